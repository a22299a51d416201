"""Opens what is measured: grinf, the Hugging Face baseline or the simulated server; and its catalogue."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from grinf.backend.interface import EngineOptions
from grinf.config import parse
from grinf.config.fields import Dtype
from grinf.config.settings import BenchSettings
from grinf.errors import UsageError
from grinf.jobs.bench.clock import Clock, VirtualClock
from grinf.jobs.bench.driver import BenchEngine
from grinf.jobs.bench.point import SYNTHETIC, Point
from grinf.jobs.bench.sim import BatchServer, SimEngine
from grinf.jobs.catalogue import CODEBOOK, skewed_catalogue, uniform_catalogue
from grinf.trie import TokenMapping, Trie
from grinf.trie.store import read_manifest
from grinf.trie.tokens import check_tokenizer

KINDS = ("grinf", "hf", "sim")
MOST_RATE, MOST_BATCH = 20_000, 1_024
"""Requests/s and requests of a batch up to which a simulation ends in minutes."""
Parsers = Mapping[str, Callable[[str], Any]]
SIM_FIELDS: Parsers = {
    "base": parse.parse_duration_ns,
    "per_req": parse.parse_duration_ns,
    "max_batch": parse.parse_count,
}
SYNTHETIC_FIELDS: Parsers = {
    "items": parse.parse_count,
    "levels": parse.parse_count,
    "codebook": parse.parse_count,
    "skew": parse.parse_float,
}


def _positive(text: str) -> int:
    if (count := parse.parse_count(text)) < 1:
        raise UsageError(f"{text!r} is below 1", fix="write a count of at least 1")
    return count


def _dtype(text: str) -> str:
    if text not in get_args(Dtype):
        raise parse.unknown("dtype", text, get_args(Dtype))
    return text


OPTION_FIELDS: Parsers = {
    "dtype": _dtype,
    "graphs": parse.parse_bool,
    "max_batch": _positive,
    "max_batch_tokens": _positive,
    "page_size": _positive,
}


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine ready to measure.

    Attributes:
        max_batch: Requests that it holds at once.
        trie: Catalogue, bound to the model's tokens; None: the search is free.
        options: How a real engine was built; None for the simulated one.
        max_context: Longest prompt, tokens; None: any.
        sids_only: Its answers hold neither scores nor items, as those of transformers.
    """

    engine: BenchEngine
    max_batch: int
    trie: Trie | None = None
    options: EngineOptions | None = None
    max_context: int | None = None
    sids_only: bool = False


def check_spec(spec: str) -> None:
    """Check how an engine is spelled, without opening it.

    Raises:
        UsageError: Another word than an engine's, or an option that it does not take.
    """
    if kind_of(spec) == "sim":
        sim_server(spec)
    else:
        _option_fields(spec)


def kind_of(spec: str) -> str:
    """`grinf`, `hf` or `sim`.

    Raises:
        UsageError: Another word.
    """
    kind = spec.partition(":")[0]
    if kind not in KINDS:
        raise parse.unknown("engine", kind, KINDS)
    return kind


def sim_server(spec: str) -> BatchServer:
    """Read `sim:base=9ms,per_req=4.5ms,max_batch=16`; a part that is left out has the value shown here."""
    given = _fields(spec, SIM_FIELDS)
    if not all(given.values()):
        raise UsageError(f"{spec!r} has a zero in it", fix="every part of a simulated engine is above zero")
    names = {"base": "base_ns", "per_req": "per_request_ns", "max_batch": "max_batch"}
    server = BatchServer(**{names[name]: value for name, value in given.items()})
    n, full_ns = server.max_batch, server.base_ns + server.max_batch * server.per_request_ns
    if n > MOST_BATCH or 1e9 * n / full_ns > MOST_RATE:
        why = f"every request is simulated: at most {MOST_RATE:,} a second, and {MOST_BATCH:,} at a time"
        raise UsageError(f"{spec!r} is too fast", why, "take longer times, or a smaller max_batch")
    return server


def open_engine(settings: BenchSettings, spec: str, point: Point, clock: Clock) -> OpenEngine:
    """Open the engine of a point; all points that differ in input length alone share it.

    Raises:
        GrinfError: What `Engine.load` or the catalogue refuses.
    """
    if isinstance(clock, VirtualClock):
        server = sim_server(spec)
        return OpenEngine(SimEngine(server, clock, point.beams), server.max_batch)
    if len(settings.devices) > 1:
        from grinf.jobs.bench.fleet import open_fleet

        return open_fleet(settings, spec, point)
    options = _engine_options(settings, spec, point)
    trie = load_catalog(point.catalog, options.model) if point.catalog else None
    if kind_of(spec) == "hf":
        from grinf.jobs.bench.hf import HfEngine

        baseline = HfEngine(options, trie)
        return OpenEngine(baseline, 1, trie, options, baseline.max_context, sids_only=True)
    from grinf.runtime.engine import Engine

    engine = Engine.load(options, trie)
    return OpenEngine(engine, options.max_batch, trie, options, engine.max_context)


def _engine_options(settings: BenchSettings, spec: str, point: Point) -> EngineOptions:
    """Options of a real engine; `grinf:graphs=off,decode_attention=torch` changes them for an A/B run."""
    from grinf.backend.registry import OPS

    score = parse.parse_score(point.score)
    common: dict[str, Any] = {**settings.engine_options(), "beams": point.beams}
    options = EngineOptions(**common)
    changes = _option_fields(spec)
    kernels = {op: changes.pop(op) for op in OPS if op in changes}
    return replace(
        options, score=score.mode, score_k=score.k, kernels={**options.kernels, **kernels}, **changes
    )


def _option_fields(spec: str) -> dict[str, Any]:
    from grinf.backend.registry import OPS

    return _fields(spec, {**OPTION_FIELDS, **dict.fromkeys(OPS, str)})


def _fields(spec: str, parsers: Parsers) -> dict[str, Any]:
    given = spec.partition(":")[2]
    try:
        return parse.parse_fields(given, parsers) if given else {}
    except UsageError as error:
        raise UsageError(f"{spec}: {error.what}", error.why, error.fix) from error


def model_facts(model: Path | None) -> list[Any]:
    """What of a model bears on the work of a run: its architecture, and the sizes of its weights."""
    assert model is not None
    architecture = model / "config.json" if model.is_dir() else model
    sizes = sorted((file.name, file.stat().st_size) for file in model.glob("*.safetensors"))
    return [hashlib.sha256(architecture.read_bytes()).hexdigest(), sizes]


@lru_cache(maxsize=1)
def load_catalog(spec: str, model: str) -> Trie:
    """Open or make a catalogue; one that knows no tokens gets the last rows of the model's vocabulary."""
    from grinf.model.config import read_config

    trie = _synthetic(spec) if spec.startswith(SYNTHETIC) else Trie.open(Path(spec))
    trie = replace(trie, views={}, deleted=None)  # The catalogue as built, which every engine can search.
    if trie.token_ids is not None:
        check_tokenizer(trie, Path(model))
        return trie
    sizes, has_end = trie.codebook_sizes, any(end is not None for end in trie.end_codes)
    end = read_config(Path(model)).vocab_rows - 1
    bases = [end + (not has_end) - sum(sizes[level:]) for level in range(trie.levels)]
    if bases[0] < 0:
        why = f"{sum(sizes):,} codes need as many token ids"
        raise UsageError(f"{model} has too few token ids for {spec}", why, "take a smaller codebook")
    return trie.with_tokens(TokenMapping.from_bases(bases, sizes, end if has_end else None))


def check_catalog(spec: str) -> None:
    """Check that a catalogue can be made, or that its file begins as a trie does.

    Raises:
        GrinfError: Neither.
    """
    if spec.startswith(SYNTHETIC):
        _synthetic_fields(spec)
    else:
        read_manifest(Path(spec))


def _synthetic(spec: str) -> Trie:
    from grinf.trie import trie_of

    items, levels, codebook, skew = _synthetic_fields(spec)
    ids, codes = (skewed_catalogue if skew else uniform_catalogue)(items)
    return trie_of(codes[:, :levels] * codebook // CODEBOOK, ids, codebook_sizes=(codebook,) * levels)


def _synthetic_fields(spec: str) -> tuple[int, int, int, float]:
    defaults: dict[str, Any] = {"items": 1_000_000, "levels": 3, "codebook": CODEBOOK, "skew": 1.1}
    items, levels, codebook, skew = (defaults | _fields(spec, SYNTHETIC_FIELDS)).values()
    if levels not in (1, 2, 3) or skew not in (0, 1.1) or not 0 < codebook <= CODEBOOK or not items:
        why = f"it has up to 3 levels of up to {CODEBOOK:,} codes, and skew 1.1 or 0 (uniform)"
        raise UsageError(f"{spec!r} is no synthetic catalogue", why, "write synthetic:items=1M,skew=0")
    return items, levels, codebook, skew
