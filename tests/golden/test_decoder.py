"""Our decoder against Hugging Face transformers: every family and variant that we accept."""

from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grinf.model.config import read_config
from grinf.model.decoder import Decoder, rotary_table
from grinf.model.weights import load_weights
from grinf.ops import reference

SMALL = {
    "vocab_size": 80,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False)),
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "qwen3 bias": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8, attention_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=False)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "llama bias": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama3 rope": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
}


def attend_causally(decoder: Decoder, positions: torch.Tensor):
    """The attention of one whole sequence, with nothing cached: shows that the decoder needs no engine."""
    config = decoder.config
    cos_sin = rotary_table(config, int(positions.max()) + 1, torch.device("cpu"))
    heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        weights = decoder.weights.layers[layer]
        qkv = qkv.view(len(qkv), sum(heads), config.head_dim)
        sink = torch.empty(len(qkv), config.num_kv_heads, config.head_dim)
        reference.qk_norm_rope_write(
            qkv,
            weights.q_norm,
            weights.k_norm,
            config.rms_norm_eps,
            cos_sin,
            positions,
            sink,
            sink.clone(),
            torch.arange(len(qkv)),
            keep_k=True,
        )
        lens = (len(qkv),)
        scale = config.head_dim**-0.5
        return reference.prefill_attention(
            *qkv.split(heads, dim=1), torch.tensor([0, *lens]), lens, scale
        ).flatten(1)

    return attend


@pytest.fixture(params=CASES, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    model_class, config = CASES[request.param]
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("model")
    shard = "20KB" if request.param in ("qwen3", "llama") else "1GB"
    model.save_pretrained(folder, max_shard_size=shard)
    return model, folder


@torch.inference_mode()
def test_logits_equal_transformers(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    model, folder = checkpoint
    config = read_config(folder)
    decoder = Decoder(config, load_weights(folder, config, torch.float32, torch.device("cpu"), seed=0))
    tokens = torch.randint(0, SMALL["vocab_size"], (70,), dtype=torch.int32)
    attend = attend_causally(decoder, torch.arange(len(tokens)))
    logits = decoder.forward(tokens, attend, reference) @ decoder.weights.head.T
    expected = model(tokens[None].long()).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@torch.inference_mode()
def test_last_rows_are_the_same_rows(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    _, folder = checkpoint
    config = read_config(folder)
    decoder = Decoder(config, load_weights(folder, config, torch.float32, torch.device("cpu"), seed=0))
    tokens = torch.randint(0, SMALL["vocab_size"], (20,), dtype=torch.int32)
    attend = attend_causally(decoder, torch.arange(len(tokens)))
    rows = torch.tensor([19, 3])
    few = decoder.forward(tokens, attend, reference, last_rows=rows)
    torch.testing.assert_close(few, decoder.forward(tokens, attend, reference)[rows], atol=1e-5, rtol=1e-5)


def test_shards_are_what_was_tested(checkpoint: tuple[torch.nn.Module, Path]) -> None:
    model, folder = checkpoint
    shards = list(folder.glob("*.safetensors"))
    sharded = (
        isinstance(model, Qwen3ForCausalLM | LlamaForCausalLM)
        and (folder / "model.safetensors.index.json").exists()
    )
    assert len(shards) > 1 if sharded else len(shards) == 1
