"""Weights of a decoder: streamed from safetensors, or drawn from a seed for an architecture file."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from grinf.errors import ModelError
from grinf.model.config import ModelConfig
from grinf.model.decoder import DecoderWeights, LayerWeights

Fetch = Callable[[str, tuple[int, ...]], Tensor]
"""fetch(name, shape) -> tensor of that shape, in the compute dtype, on the compute device."""
EachLayer = Callable[[Callable[[str], LayerWeights], list[str]], Iterable[LayerWeights]]
"""`map`, or a thread pool's: its function over the prefixes of the layers' names."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_weights(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> DecoderWeights:
    """Read a checkpoint folder, or draw seeded random weights where `path` is an architecture file.

    Raises:
        ModelError: No safetensors file, an unreadable one, a missing tensor or a tensor of the wrong shape.
    """
    if not path.is_dir():
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # a generator draws on one core
            return _assemble(config, random_fetch(seed, dtype, device), pool.map)
    with ExitStack() as files:
        return _assemble(config, _checkpoint_fetch(path, files, dtype, device), map)


def _assemble(config: ModelConfig, fetch: Fetch, each: EachLayer) -> DecoderWeights:
    """Fetch every tensor under its Hugging Face name and fuse what is read together."""
    embed = fetch("model.embed_tokens.weight", (config.vocab_rows, config.hidden_size))
    head = embed if config.tied_head else fetch("lm_head.weight", (config.vocab_rows, config.hidden_size))
    prefixes = [f"model.layers.{index}." for index in range(config.num_layers)]
    layers = list(each(partial(_layer, config, fetch), prefixes))
    return DecoderWeights(embed, layers, fetch("model.norm.weight", (config.hidden_size,)), head)


def _layer(config: ModelConfig, fetch: Fetch, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def fused(names: dict[str, int], columns: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = [fetch(f"{prefix}{name}.weight", (rows, columns)) for name, rows in names.items()]
        biases = [fetch(f"{prefix}{name}.bias", (rows,)) for name, rows in names.items()] if bias else None
        return torch.cat(weight), torch.cat(biases) if biases else None

    qkv_names = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    qkv, qkv_bias = fused(qkv_names, hidden, config.qkv_bias)
    o, o_bias = fused({"self_attn.o_proj": hidden}, q_rows, config.o_bias)
    gate_up, gate_up_bias = fused({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
    down, down_bias = fused({"mlp.down_proj": hidden}, inner, config.mlp_bias)
    head_shape = (config.head_dim,)
    return LayerWeights(
        input_norm=fetch(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=fetch(f"{prefix}self_attn.q_norm.weight", head_shape) if config.qk_norm else None,
        k_norm=fetch(f"{prefix}self_attn.k_norm.weight", head_shape) if config.qk_norm else None,
        o=o,
        o_bias=o_bias,
        post_norm=fetch(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )


def _checkpoint_fetch(path: Path, files: ExitStack, dtype: torch.dtype, device: torch.device) -> Fetch:
    """Serve tensors from the safetensors files of `path`, which stay open until `files` closes."""
    owner = {}
    for shard in _shards(path):
        try:
            handle = files.enter_context(safe_open(shard, framework="pt"))
            owner.update(dict.fromkeys(handle.keys(), handle))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"cannot read {shard}", str(error), "copy or download the checkpoint again"
            ) from error

    def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in owner:
            raise ModelError(
                f"{path} has no tensor {name!r}",
                f"its config.json promises one of shape {list(shape)}",
                "check that config.json and the safetensors files belong together",
            )
        stored = owner[name].get_slice(name)
        found = tuple(stored.get_shape())
        if stored.get_dtype() not in _FLOATS:
            raise ModelError(
                f"{path}: tensor {name!r} holds {stored.get_dtype()}",
                f"grinf reads {', '.join(_FLOATS)}; quantised weights need their own kernels",
                "save the model in one of these",
            )
        if found != shape:
            raise ModelError(
                f"{path}: tensor {name!r} has shape {list(found)}, config.json says {list(shape)}",
                fix="check that config.json and the safetensors files belong together",
            )
        return owner[name].get_tensor(name).to(device=device, dtype=dtype)

    return fetch


def check_files(path: Path) -> None:
    """Check that a checkpoint folder has the files of its weights, without reading them.

    Raises:
        ModelError: It lacks some, or all.
    """
    list(_shards(path))


def _shards(path: Path) -> Iterator[Path]:
    index = path / _INDEX
    if (path / _SINGLE).is_file():
        yield path / _SINGLE
    elif index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in names if not (path / name).is_file()]
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise ModelError(f"cannot read {index}", f"{type(error).__name__}: {error}") from error
        if missing:
            raise ModelError(
                f"{path} lacks {', '.join(missing)}", f"{_INDEX} lists it", "finish the download"
            )
        yield from (path / name for name in names)
    else:
        raise ModelError(
            f"{path} has no weights",
            f"neither {_SINGLE} nor {_INDEX} is there; other formats are not read",
            "save the model with safe_serialization, or pass an architecture file for random weights",
        )


def random_fetch(seed: int, dtype: torch.dtype, device: torch.device) -> Fetch:
    """Draw each tensor from its own generator, so that a tensor's values depend on seed and name alone.

    Matrices are normal with standard deviation 0.02, norms are one: the usual initialisation of the family.
    """

    def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            value = torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            return value.to(device=device, dtype=dtype)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return (torch.randn(shape, generator=generator) * 0.02).to(device=device, dtype=dtype)

    return fetch
