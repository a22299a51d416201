"""The grid of a sweep: what the settings leave open is chosen for the device at hand."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from grinf.config.parse import Score
from grinf.config.settings import BenchSettings
from grinf.errors import UsageError
from grinf.jobs.bench.engines import check_catalog, check_spec, kind_of
from grinf.jobs.bench.point import Point, file_name

NOT_IDENTITY = {"output", "name", "resume", "dry_run", "budget", "verify"}
"""Settings that do not change what a run measures: it can be resumed with others."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """A grid that finishes: on a GPU in a quarter of an hour, on a CPU (a smoke test) in three minutes."""

    model: str
    input_len: tuple[int, ...]
    beams: tuple[tuple[int, ...], ...]
    preset: str
    catalog: str
    budget_ns: int | None
    assumed_rps: float


_SCHEDULES = ((900,), (20, 300, 900))
_SMALL = "synthetic:items=20k,codebook=256"
GPU = Defaults("qwen3-0.6b", (100, 500, 1000), _SCHEDULES, "quick", "synthetic:items=1M", None, 120.0)
CPU = Defaults("tiny", (32, 128), ((32,),), "smoke", _SMALL, 120_000_000_000, 30.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep, resolved.

    Attributes:
        settings: With the model filled in.
        points: In the order of measuring: lengths of one engine together, short ones first.
        rival: Spelling of the engine that takes turns with the first; empty: the points are searched.
    """

    settings: BenchSettings
    points: tuple[Point, ...]
    preset: str
    budget_ns: int | None
    rival: str
    assumed_rps: float

    @property
    def config_hash(self) -> str:
        """Identity of the run: settings that change its results, and the grid."""
        spelled = {key: value for key, value in self.settings.spelled().items() if key not in NOT_IDENTITY}
        identity = [spelled, [point.key for point in self.points], self.preset, self.rival]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def is_virtual(self) -> bool:
        """Whether time is simulated."""
        return kind_of(self.settings.engine) == "sim"


def make_plan(settings: BenchSettings) -> Plan:
    """Resolve the grid; looks only whether there are a GPU and the catalogues.

    Raises:
        UsageError: No SLA, an engine or a catalogue that does not exist, or engines on different clocks.
    """
    if not settings.sla:
        raise UsageError("there is no SLA to keep", "the list of them is empty", "write --sla p99:100ms")
    check_spec(settings.engine)
    virtual, rival = kind_of(settings.engine) == "sim", _rival(settings)
    if virtual and "," in settings.device:
        why = "it runs on no device"
        raise UsageError(f"{settings.engine} takes no --devices {settings.device}", why, "leave them out")
    if not re.fullmatch(r"\w[\w.-]*", settings.name):
        why, fix = "it becomes part of a folder's name", "take letters, digits, '-', '_' and '.'"
        raise UsageError(f"--name {settings.name!r} is no name", why, fix)
    defaults = GPU if not virtual and settings.devices[0] != "cpu" and _has_gpu() else CPU
    if settings.model is None and not virtual:
        settings = settings.model_copy(update={"model": shipped_model(defaults.model)})
    if rival and not settings.aa and settings.memory_fraction is None:
        settings = settings.model_copy(update={"memory_fraction": 0.45})  # both engines are resident
    catalogs = _catalogs(settings, defaults)
    for catalog in filter(None, catalogs):
        check_catalog(catalog)
    points = [
        Point(settings.engine, length, beams, catalog, str(score))
        for catalog in catalogs
        for score in _scores(settings, catalog)
        for beams in settings.beams or defaults.beams
        for length in sorted(settings.input_len or defaults.input_len)
    ]
    points = tuple({point.key: point for point in points}.values())  # A catalogue may be named twice.
    unasked = settings.budget is None and settings.preset is None and not virtual
    budget_ns = defaults.budget_ns if unasked else settings.budget
    return Plan(settings, points, settings.preset or defaults.preset, budget_ns, rival, defaults.assumed_rps)


def _rival(settings: BenchSettings) -> str:
    """Spelling of the second engine; empty: there is none."""
    engine, rival = settings.engine, settings.versus
    if rival is None and not settings.aa and settings.origin.get("interleave") == "--interleave":
        fix = "add --versus ENGINE, or --aa"
        raise UsageError(f"--interleave {settings.interleave} has no second engine to take turns", fix=fix)
    if rival is None:
        return f"{engine}#2" if settings.aa else ""
    check_spec(rival)
    if settings.aa:
        why = "--aa is an engine against itself"
        raise UsageError(f"--aa takes no --versus {rival}", why, "give one of them")
    if (kind_of(engine) == "sim") != (kind_of(rival) == "sim"):
        raise UsageError(f"{engine} and {rival} run on different clocks", fix="compare engines of one kind")
    if file_name(engine) == file_name(rival):
        raise UsageError(f"--versus {rival} is the engine itself", fix="use --aa to compare it with itself")
    return rival


def shipped_model(name: str) -> Path:
    """Architecture file that comes with grinf: in the checkout, or inside the installed package.

    Raises:
        UsageError: It is in neither.
    """
    package = Path(__file__).parents[2]
    for root in (package.parent, package):
        if (path := root / "bench_configs" / "models" / f"{name}.json").is_file():
            return path
    raise UsageError("no model is given", "the architecture files are not installed", "add --model DIR")


def _catalogs(settings: BenchSettings, defaults: Defaults) -> list[str]:
    """Catalogues to search; the empty one is a free search. One that is named is there to be searched."""
    mode = settings.constrained
    if (settings.trie or settings.catalog) and settings.origin.get("constrained") == "default":
        mode = "on"
    given = list(settings.catalog or ([str(settings.trie)] if settings.trie else [defaults.catalog]))
    return [""] * (mode != "on") + given * (mode != "off")


def _scores(settings: BenchSettings, catalog: str) -> list[Score]:
    """Score modes to sweep; a free search has only those that need no catalogue."""
    modes = list(settings.scores or (settings.score,))
    free = [mode for mode in modes if mode.mode in ("vocab", "topk")]
    return modes if catalog else free or modes[:1]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
