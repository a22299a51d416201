"""Build a backend: read the model, fit the catalogue to it, plan memory, resolve kernels."""

import os
import re
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from grinf.backend.buckets import BucketTable, make_buckets, width_buckets
from grinf.backend.interface import Capacity, EngineOptions
from grinf.backend.registry import Ops, Site, default_registry
from grinf.backend.runner import EagerRunner, GraphRunner
from grinf.backend.scoring import Scoring, check_score, check_trie
from grinf.backend.steps import BackendState
from grinf.backend.torch_backend import BackendParts, TorchBackend
from grinf.errors import EnvironmentFault, UsageError
from grinf.model.config import ModelConfig, read_config
from grinf.model.decoder import Decoder, rotary_table
from grinf.model.weights import DecoderWeights, load_weights
from grinf.state.beam_kv import BeamKV
from grinf.state.beam_path import BeamPath
from grinf.state.context_kv import ContextKV
from grinf.state.memory import KVShape, MemoryPlan, plan_memory
from grinf.state.request import BeamWidthPolicy
from grinf.trie import Trie

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_CONTEXT = 8192
_DEFAULT_LEVELS = 3
_MAX_BEAMS = 4096  # The kernels of the selection are built for as many; one limit holds everywhere.
_CPU_PAGE, _GPU_PAGE = 64, 64


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all parts are sized by: model, device and search, checked before anything is allocated.

    Attributes:
        candidates: Candidates at each level at most. bounds: Beams alive after each level.
    """

    options: EngineOptions
    config: ModelConfig
    policy: BeamWidthPolicy
    trie: Trie | None
    device: torch.device
    dtype: torch.dtype
    page_size: int
    ops: Ops
    candidates: tuple[int, ...]
    bounds: tuple[int, ...]
    max_context: int

    @property
    def kv_width(self) -> int:
        """Beams with keys: the last level's tokens are never fed."""
        return max(self.bounds[:-1], default=1)

    @property
    def is_captured(self) -> bool:
        """Whether steps become CUDA graphs."""
        return self.options.graphs and self.device.type == "cuda"


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
    frame = _frame(options, policy, levels, trie)
    weights = load_weights(Path(options.model), frame.config, frame.dtype, frame.device, options.seed)
    plan = _plan(frame)
    state = _state(frame, plan, weights)
    capacity = _capacity(frame, plan, mixed_levels=state.scoring.mixed_levels)
    runner = GraphRunner() if frame.is_captured else EagerRunner(frame.device)
    buckets, told = _buckets(frame, capacity), _description(frame, plan)
    parts = BackendParts(state, frame.ops, runner, buckets, capacity, policy, trie, options.score_k, told)
    return TorchBackend(parts)


def _frame(options: EngineOptions, policy: BeamWidthPolicy, levels: int, trie: Trie | None) -> _Frame:
    """Check options, model, catalogue and kernels against one another."""
    device = _device(options.device)
    config = read_config(Path(options.model))
    check_score(options.score, constrained=trie is not None)
    if trie is not None:
        check_trie(trie, config.vocab_rows)
    dtype_name = _dtype_name(options.dtype, config, device)
    page_size = options.page_size or (_GPU_PAGE if device.type == "cuda" else _CPU_PAGE)
    site = Site(device.type, _capability(device), dtype_name, config.head_dim, config.group, page_size)
    ops = default_registry().resolve(site, options.kernels)
    candidates = _candidates(levels, config, trie)
    bounds = _level_bounds(policy, candidates)
    if max(bounds) > _MAX_BEAMS:
        raise UsageError(f"--beams asks for {max(bounds):,} live beams", fix=f"take {_MAX_BEAMS:,} at most")
    max_context = min(options.max_context or _DEFAULT_CONTEXT, config.max_positions - levels)
    if max_context < 1:
        raise UsageError(
            f"{config.max_positions} positions hold no prompt and a SID of {levels} tokens",
            "the model's max_position_embeddings is the limit of both together",
            "use another model, or fewer --levels",
        )
    resolved = (device, _DTYPES[dtype_name], page_size, ops, candidates, bounds, max_context)
    return _Frame(options, config, policy, trie, *resolved)


def checked(options: EngineOptions) -> EngineOptions:
    """Options in Python's own numbers; the command line has refused wrong ones in its own words.

    Raises:
        UsageError: A number of another kind, or outside its bounds.
    """
    beams: Any = options.beams
    if not isinstance(beams, tuple | list) or not beams:
        raise UsageError(f"EngineOptions(beams={beams!r})", "it is a tuple: (900,) or (20, 300, 900)")
    optional = [
        name for name in ("score_k", "max_context", "page_size") if getattr(options, name) is not None
    ]
    names = ["max_batch", "max_batch_tokens", "min_beams", "workspace_bytes", *optional]
    counts = {name: getattr(options, name) for name in names}
    widths = {f"beams[{level}]": width for level, width in enumerate(beams)}
    wrong = {name: value for name, value in (counts | widths).items() if not _is_count(value)}
    share: Any = options.memory_fraction
    margin: Any = options.score_margin
    if not isinstance(share, Real) or not 0 < float(share) <= 1:
        wrong["memory_fraction"] = share
    if margin is not None and not (isinstance(margin, Real) and float(margin) >= 0):
        wrong["score_margin"] = margin
    if wrong:
        told = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        why = "counts and sizes are whole numbers from 1, a margin starts at 0, a share of memory ends at 1"
        raise UsageError(f"EngineOptions({told})", why)
    plain = {name: int(value) for name, value in counts.items()}
    return replace(options, **plain, beams=tuple(map(int, beams)), memory_fraction=float(share))


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _plan(frame: _Frame) -> MemoryPlan:
    """Divide what is left of the free memory after the workspace between ContextKV and BeamKV."""
    options, config = frame.options, frame.config
    shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, frame.dtype.itemsize)
    budget = int(options.memory_fraction * _free_bytes(frame.device)) - options.workspace_bytes
    return plan_memory(
        shape,
        budget,
        max_slots=2 * options.max_batch,
        page_size=frame.page_size,
        max_context=frame.max_context,
        num_steps=len(frame.candidates) - 1,
        max_width=frame.kv_width,
    )


def _state(frame: _Frame, plan: MemoryPlan, weights: DecoderWeights) -> BackendState:
    """Allocate the model and the pools."""
    config, options, dtype, device = frame.config, frame.options, frame.dtype, frame.device
    layers, slots, levels = config.num_layers, plan.num_slots, len(frame.candidates)
    heads = (config.num_kv_heads, config.head_dim)
    filter_slots = slots if options.filters and frame.trie is not None else 0
    return BackendState(
        model=Decoder(config, weights),
        context_kv=ContextKV(layers, plan.num_pages, frame.page_size, *heads, dtype, device),
        beam_kv=BeamKV(layers, slots, levels - 1, frame.kv_width, *heads, dtype, device),
        path=BeamPath(slots, levels, max(frame.bounds), device),
        cos_sin=rotary_table(config, frame.max_context + levels, device),
        scoring=Scoring(
            options.score,
            weights.head,
            frame.trie,
            options.workspace_bytes,
            filter_slots,
            sid_mass=options.sid_mass,
        ),
    )


def _capacity(frame: _Frame, plan: MemoryPlan, *, mixed_levels: bool) -> Capacity:
    """What the scheduler and the ledger have to respect."""
    shrinking = frame.policy.margin is not None
    return Capacity(
        num_pages=plan.num_pages,
        page_size=frame.page_size,
        num_slots=plan.num_slots,
        max_context=frame.max_context,
        max_batch=min(frame.options.max_batch, plan.num_slots),
        max_batch_tokens=frame.options.max_batch_tokens,
        max_width=max(frame.bounds),
        vocab_rows=frame.config.vocab_rows,
        level_widths=frame.candidates,
        mixed_levels=mixed_levels,
        width_buckets=width_buckets(frame.bounds, shrinking=shrinking) if frame.is_captured else (),
        views=tuple(frame.trie.views) if frame.trie is not None else (),
        filter_words=-(-frame.trie.level_offset[-1] // 32) if frame.options.filters and frame.trie else 0,
    )


def _buckets(frame: _Frame, capacity: Capacity) -> BucketTable:
    """The shapes that are captured; none without graphs."""
    if not frame.is_captured:
        return BucketTable()
    is_eager = "prefill_attention" in frame.ops.eager
    tokens = min(capacity.max_batch_tokens, capacity.max_batch * capacity.max_context)
    return make_buckets(
        frame.bounds,
        capacity.width_buckets,
        capacity.max_batch,
        0 if is_eager else tokens,
        mixed_levels=capacity.mixed_levels,
        shrinking=frame.policy.margin is not None,
    )


def _description(frame: _Frame, plan: MemoryPlan) -> dict[str, Any]:
    """What results say about the engine."""
    return {
        "device": _device_name(frame.device),
        "dtype": str(frame.dtype).removeprefix("torch."),
        "score": frame.options.score,
        "score_k": frame.options.score_k,
        "kernels": dict(frame.ops.names),
        "memory": asdict(plan),
        "max_context": frame.max_context,
        "widths": list(frame.bounds),
    }


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
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # Where kernels, streams and graphs are without a word about it.
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
    """What it is, not which one of its kind: answers name it, and any of a kind gives the same."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _free_bytes(device: torch.device) -> int:
    """Memory that is free now, before pools are made."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
