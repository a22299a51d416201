"""Read a Hugging Face `config.json`, or an architecture file like it, into our names, or refuse it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grinf.errors import ModelError

_ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
_DTYPES = {"float32", "bfloat16", "float16"}
_NEUTRAL = {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": []}
_SAMPLING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling; see `model.rotary`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder of the Llama family.

    Attributes:
        kind: `qwen3`, `qwen2` or `llama`.
        vocab_rows: Rows of the embedding and of the lm_head; may exceed the tokenizer's vocabulary.
        max_positions: Longest sequence that the checkpoint was made for, tokens.
        qkv_bias, o_bias, mlp_bias: Which projections carry a bias.
        qk_norm: Whether queries and keys are normalised per head (Qwen3).
        dtype: Dtype that the checkpoint names, the default compute dtype on a GPU.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_rows: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_q_heads // self.num_kv_heads


def read_config(path: Path) -> ModelConfig:
    """Read `path`, a checkpoint folder or an architecture file.

    Raises:
        ModelError: The file is missing or not JSON, or describes something that grinf does not run.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"no model at {path}",
            f"{file} does not exist",
            "pass --model a checkpoint folder or an architecture file",
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {file}", str(error)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON", str(error), "download the checkpoint again") from error
    if not isinstance(raw, dict):
        raise ModelError(
            f"{file} is not a model configuration", f"expected a JSON object, got {type(raw).__name__}"
        )
    return parse_config(raw, str(file))


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Turn a configuration dictionary into a `ModelConfig`.

    Raises:
        ModelError: Names every feature that is not supported, and every missing or impossible size.
    """
    kind = _kind(raw, where)
    faults = list(_unsupported(raw))
    rope_theta, rope_scaling = _rope(raw, where, faults)
    if faults:
        raise ModelError(
            f"{where}: grinf does not run this model",
            "; ".join(faults),
            "grinf runs dense Qwen3, Qwen2 and Llama",
        )

    def size(key: str, default: int | None = None) -> int:
        value = raw.get(key, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{where}: {key} is {value!r}", "a positive whole number is needed")
        return value

    hidden, q_heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", q_heads)
    head_dim = size("head_dim", hidden // q_heads)
    if q_heads % kv_heads or head_dim % 2:
        raise ModelError(
            f"{where}: {q_heads} query heads, {kv_heads} key-value heads of dimension {head_dim} do not fit",
            "query heads must be a multiple of key-value heads, and the head dimension even",
        )
    attention_bias = kind == "qwen2" or bool(raw.get("attention_bias", False))
    return ModelConfig(
        kind=kind,
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_rows=size("vocab_size"),
        max_positions=size("max_position_embeddings", 2048),
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6, where),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias,
        o_bias=attention_bias and kind != "qwen2",
        mlp_bias=bool(raw.get("mlp_bias", False)) and kind == "llama",
        qk_norm=kind == "qwen3",
        dtype=_dtype(raw, where),
    )


def read_generation(path: Path) -> dict[str, Any]:
    """What a checkpoint's `generation_config.json` asks of a search and grinf does not do; empty: nothing."""
    try:
        raw = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    asked = raw if isinstance(raw, dict) else {}
    keys = [*_NEUTRAL, *(_SAMPLING if asked.get("do_sample") else ())]
    return {key: asked[key] for key in keys if asked.get(key) not in (None, _NEUTRAL.get(key))}


def _kind(raw: Mapping[str, Any], where: str) -> str:
    named = raw.get("architectures") or raw.get("model_type")
    first = named[0] if isinstance(named, list) else named
    kind = next((kind for name, kind in _ARCHITECTURES.items() if first in (name, kind)), None)
    if kind is not None:
        return kind
    raise ModelError(
        f"{where}: architecture {first!r} is not supported",
        f"grinf runs {', '.join(_ARCHITECTURES)}",
        "convert the checkpoint to one of these, or use another model",
    )


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    """Name the features of `raw` that change the forward pass and that grinf does not compute."""
    faults = []
    if raw.get("quantization_config"):
        faults.append("quantised weights (quantization_config)")
    if raw.get("hidden_act", "silu") != "silu":
        faults.append(f"activation {raw['hidden_act']!r} (hidden_act)")
    layers = raw.get("layer_types") or []
    if not isinstance(layers, list):
        faults.append(f"layer_types {layers!r}, which is no list")
    elif "sliding_attention" in layers or (raw.get("use_sliding_window") and raw.get("sliding_window")):
        faults.append("sliding-window attention")
    if raw.get("partial_rotary_factor", 1) not in (None, 1):
        faults.append(f"partial rotary embedding (partial_rotary_factor {raw['partial_rotary_factor']})")
    faults += [f"mixture of experts ({key})" for key in ("num_experts", "num_local_experts") if raw.get(key)]
    return faults


def _rope(raw: Mapping[str, Any], where: str, faults: list[str]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from the flat keys of older configs or from `rope_parameters`."""
    given = [(key, raw[key]) for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    faults += [f"{key} {rope!r}, which is no table" for key, rope in given if not isinstance(rope, Mapping)]
    if len(given) == 2 and given[0][1] != given[1][1]:
        faults.append("rope_scaling and rope_parameters that differ: keep the one that is meant")
    if faults:
        return 0.0, None
    rope: Mapping[str, Any] = given[0][1] if given else {}
    theta = _positive({**raw, **rope}, "rope_theta", 10000.0, where)
    if rope.get("partial_rotary_factor", 1) not in (None, 1):
        faults.append(f"partial rotary embedding (partial_rotary_factor {rope['partial_rotary_factor']})")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        faults.append(f"rotary scaling {kind!r} (rope_type)")
        return theta, None
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in rope]
    if missing:
        faults.append(f"llama3 rotary scaling without {', '.join(missing)}")
        return theta, None
    factor, low, high, original = (_positive(rope, key, None, where) for key in keys)
    return theta, RopeScaling(factor, low, high, int(original))


def _positive(raw: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    value = raw.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"{where}: {key} is {value!r}", "a positive number is needed")
    return float(value)


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ModelError(
            f"{where}: dtype {dtype!r} is not supported", f"grinf computes in {', '.join(sorted(_DTYPES))}"
        )
    return dtype
