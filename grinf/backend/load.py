"""Build a backend: read the model, fit the catalogue to it, plan memory, resolve kernels."""

import os
from dataclasses import asdict
from pathlib import Path

import torch

from grinf.backend.buckets import BucketTable, make_buckets, width_buckets
from grinf.backend.interface import Capacity, EngineOptions
from grinf.backend.registry import Site, default_registry
from grinf.backend.runner import EagerRunner, GraphRunner
from grinf.backend.scoring import Scoring, check_score, check_trie
from grinf.backend.steps import BackendState
from grinf.backend.torch_backend import BackendParts, TorchBackend
from grinf.errors import EnvironmentFault, UsageError
from grinf.model.config import ModelConfig, read_config
from grinf.model.decoder import Decoder, rotary_table
from grinf.model.weights import load_weights
from grinf.state.beam_kv import BeamKV
from grinf.state.beam_path import BeamPath
from grinf.state.context_kv import ContextKV
from grinf.state.memory import KVShape, MemoryPlan, plan_memory
from grinf.state.request import BeamWidthPolicy
from grinf.trie import Trie

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_CONTEXT = 8192
_DEFAULT_LEVELS = 3
_CPU_PAGE, _GPU_PAGE = 64, 64


def load_backend(
    options: EngineOptions, policy: BeamWidthPolicy, levels: int, trie: Trie | None
) -> TorchBackend:
    """Build a backend for `options`; everything that can be refused is refused before weights are read.

    Args:
        options: See `EngineOptions`.
        policy: Beam widths of requests that bring none of their own.
        levels: Tokens per SID.
        trie: The catalogue, or None for a free search.

    Raises:
        UsageError, ModelError, TrieFileError, CapacityError, KernelUnavailable: As `Engine.load`.
    """
    device = _device(options.device)
    config = read_config(Path(options.model))
    check_score(options.score, constrained=trie is not None)
    if trie is not None:
        check_trie(trie, config.vocab_rows)
    dtype_name = _dtype_name(options.dtype, config, device)
    dtype = _DTYPES[dtype_name]
    page_size = options.page_size or (_GPU_PAGE if device.type == "cuda" else _CPU_PAGE)
    site = Site(device.type, _capability(device), dtype_name, config.head_dim, config.group, page_size)
    ops = default_registry().resolve(site, options.kernels)

    candidates = _candidates(levels, config, trie)
    bounds = _level_bounds(policy, candidates)
    kv_width = max(bounds[:-1], default=1)  # the last level's tokens are never fed, so they have no keys
    max_context = min(options.max_context or _DEFAULT_CONTEXT, config.max_positions - levels)
    if max_context < 1:
        raise UsageError(
            f"--max-context {options.max_context} leaves no room", f"the model has {config.max_positions}"
        )
    weights = load_weights(Path(options.model), config, dtype, device, options.seed)
    plan = _plan(
        options,
        config,
        dtype,
        device,
        page_size=page_size,
        max_context=max_context,
        num_steps=levels - 1,
        max_width=kv_width,
    )
    heads = (config.num_kv_heads, config.head_dim)
    filter_slots = plan.num_slots if options.filters and trie is not None else 0
    state = BackendState(
        model=Decoder(config, weights),
        context_kv=ContextKV(config.num_layers, plan.num_pages, page_size, *heads, dtype, device),
        beam_kv=BeamKV(config.num_layers, plan.num_slots, levels - 1, kv_width, *heads, dtype, device),
        path=BeamPath(plan.num_slots, levels, max(bounds), device),
        cos_sin=rotary_table(config, max_context + levels, device),
        scoring=Scoring(options.score, weights.head, trie, options.workspace_bytes, filter_slots),
    )
    captured = options.graphs and device.type == "cuda"
    shrinking = policy.margin is not None
    widths = width_buckets(bounds, shrinking=shrinking) if captured else ()
    max_batch = min(options.max_batch, plan.num_slots)
    capacity = Capacity(
        num_pages=plan.num_pages,
        page_size=page_size,
        num_slots=plan.num_slots,
        max_context=max_context,
        max_batch=max_batch,
        max_batch_tokens=options.max_batch_tokens,
        max_width=max(bounds),
        vocab_rows=config.vocab_rows,
        level_widths=candidates,
        mixed_levels=state.scoring.mixed_levels,
        width_buckets=widths,
        views=tuple(trie.views) if trie is not None else (),
        filters=filter_slots > 0,
    )
    description = {
        "device": _device_name(device),
        "dtype": dtype_name,
        "score": options.score,
        "score_k": options.score_k,
        "kernels": dict(ops.names),
        "memory": asdict(plan),
        "max_context": max_context,
        "widths": list(bounds),
    }
    buckets = BucketTable()
    if captured:
        tokens = (
            0 if "prefill_attention" in ops.eager else min(options.max_batch_tokens, max_batch * max_context)
        )
        mixed = state.scoring.mixed_levels
        buckets = make_buckets(bounds, widths, max_batch, tokens, mixed_levels=mixed, shrinking=shrinking)
    runner = GraphRunner() if captured else EagerRunner(device)
    parts = BackendParts(state, ops, runner, buckets, capacity, policy, trie, options.score_k, description)
    return TorchBackend(parts)


def sid_levels(options: EngineOptions, trie: Trie | None) -> int:
    """Tokens per SID: the trie's depth, or what `--levels` says.

    Raises:
        UsageError: `--levels` is not positive, or contradicts the trie.
    """
    if options.levels is not None and options.levels < 1:
        raise UsageError(f"--levels {options.levels}: a SID has at least one level")
    if trie is None:
        return options.levels or _DEFAULT_LEVELS
    if options.levels not in (None, trie.levels):
        raise UsageError(
            f"--levels {options.levels} contradicts the trie, whose SIDs have {trie.levels} levels",
            fix="leave --levels out: with a trie its depth decides",
        )
    return trie.levels


def _level_bounds(policy: BeamWidthPolicy, candidates: tuple[int, ...]) -> tuple[int, ...]:
    """Beams that can be alive after each level."""
    return tuple(min(policy.width(level), most) for level, most in enumerate(candidates))


def _candidates(levels: int, config: ModelConfig, trie: Trie | None) -> tuple[int, ...]:
    """Candidates at each level at most: the trie's nodes, or every sequence of tokens."""
    return (
        trie.num_nodes
        if trie is not None
        else tuple(config.vocab_rows ** (level + 1) for level in range(levels))
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name} is not a device", fix="use auto, cpu, or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} is not supported", fix="use auto, cpu, or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise EnvironmentFault(
                f"--device {name}: this machine shows {count} CUDA devices",
                "the driver, the GPU or a CUDA build of torch is missing" if count == 0 else "",
                "run `grinf doctor`, or use --device cpu",
            )
        return torch.device("cuda", device.index or 0)
    return device


def _dtype_name(name: str, config: ModelConfig, device: torch.device) -> str:
    if name == "auto":
        return "float32" if device.type == "cpu" else config.dtype
    if name not in _DTYPES:
        raise UsageError(f"--dtype {name} is not supported", fix=f"use auto, {', '.join(_DTYPES)}")
    return name


def _capability(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _free_bytes(device: torch.device) -> int:
    """Memory that is free now, before pools are made."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _plan(
    options: EngineOptions, config: ModelConfig, dtype: torch.dtype, device: torch.device, **sizes: int
) -> MemoryPlan:
    """Divide what is left of the free memory after the workspace between ContextKV and BeamKV."""
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype.itemsize)
    budget = int(options.memory_fraction * _free_bytes(device)) - options.workspace_bytes
    return plan_memory(shape, budget, max_slots=2 * options.max_batch, **sizes)
