"""Which models are refused, by name, before a weight is read."""

import json
from pathlib import Path

import pytest
import torch

from grinf.errors import ModelError
from grinf.model.config import parse_config, read_config
from grinf.model.weights import load_weights

GOOD = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": [], "model_type": "mamba"}, "mamba"),
        ({"architectures": None}, "None"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3 rotary scaling without factor"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"num_attention_heads": 3}, "do not fit"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"dtype": "int8"}, "int8"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}}, "that differ"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": "llama3"}, "rope_scaling 'llama3', which is no table"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\], which is no table"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_scaling": {**LLAMA3, "factor": "x"}}, "factor is 'x'"),
        ({"rope_theta": "abc"}, "rope_theta is 'abc'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"architectures": 5}, "architecture 5"),
        ({"architectures": {"a": 1}}, "architecture {'a': 1}"),
        ({"layer_types": 5}, "layer_types 5"),
    ],
)
def test_unsupported_models_are_named(change: dict, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config({**GOOD, **change}, "config.json")


def test_both_spellings_of_rope_are_read() -> None:
    old = parse_config({**GOOD, "rope_theta": 5e5}, "c")
    new = parse_config({**GOOD, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "c")
    assert old.rope_theta == new.rope_theta == 5e5
    assert old.rope_scaling is None


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read_config(tmp_path)


def write_checkpoint(folder: Path, **change: torch.Tensor) -> None:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(GOOD), encoding="utf-8")
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.zeros(50, 32),
        "model.norm.weight": torch.ones(32),
        f"{layer}input_layernorm.weight": torch.ones(32),
        f"{layer}post_attention_layernorm.weight": torch.ones(32),
        f"{layer}self_attn.q_proj.weight": torch.zeros(32, 32),
        f"{layer}self_attn.k_proj.weight": torch.zeros(16, 32),
        f"{layer}self_attn.v_proj.weight": torch.zeros(16, 32),
        f"{layer}self_attn.o_proj.weight": torch.zeros(32, 32),
        f"{layer}self_attn.q_norm.weight": torch.ones(8),
        f"{layer}self_attn.k_norm.weight": torch.ones(8),
        f"{layer}mlp.gate_proj.weight": torch.zeros(64, 32),
        f"{layer}mlp.up_proj.weight": torch.zeros(64, 32),
        f"{layer}mlp.down_proj.weight": torch.zeros(32, 64),
    }
    save_file(tensors | change, folder / "model.safetensors")


def load(folder: Path) -> object:
    return load_weights(folder, read_config(folder), torch.float32, torch.device("cpu"), seed=0)


def test_checkpoint_faults_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    load(tmp_path)
    write_checkpoint(tmp_path, **{"model.norm.weight": torch.ones(31)})
    with pytest.raises(ModelError, match=r"'model.norm.weight' has shape \[31\]"):
        load(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-200])
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelError, match="lacks model-00001-of-00002"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "num_hidden_layers": 2}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"has no tensor 'model\.layers\.1\."):
        load(tmp_path)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    file = tmp_path / "arch.json"
    file.write_text(json.dumps(GOOD), encoding="utf-8")
    config, cpu = read_config(file), torch.device("cpu")
    first, again, other = (load_weights(file, config, torch.float32, cpu, seed) for seed in (1, 1, 2))
    assert torch.equal(first.embed, again.embed)
    assert not torch.equal(first.embed, other.embed)
    assert not torch.equal(first.layers[0].o, first.layers[0].qkv[:32])


@pytest.mark.parametrize(
    "index", ["[]", "{", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["x"]}}']
)
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD), encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path)


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, **{"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ModelError, match="holds I8"):
        load(tmp_path)
