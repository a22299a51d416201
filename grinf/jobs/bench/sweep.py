"""`grinf bench`: measures every point of a plan, one engine after the other, and keeps all of it on disk."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby

import numpy as np

from grinf.config.settings import BenchSettings
from grinf.errors import ExitCode, GrinfError, UsageError
from grinf.jobs.bench.clock import Clock, VirtualClock
from grinf.jobs.bench.engines import OpenEngine, model_facts, open_engine
from grinf.jobs.bench.environment import describe_environment
from grinf.jobs.bench.journal import read_journal
from grinf.jobs.bench.load import random_prompts
from grinf.jobs.bench.plan import Plan, make_plan
from grinf.jobs.bench.point import Point
from grinf.jobs.bench.probe import Probe, ProbeSpec, Stage
from grinf.jobs.bench.prober import SECOND, BudgetSpent, Prober
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.search import PRESETS, Preset, Search
from grinf.jobs.bench.summary import Summary, summarise, write_summary
from grinf.jobs.bench.verify import verify
from grinf.state.request import RecallResult, Request

OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a sweep came to; `run` and `summary` are None after a dry run."""

    plan: Plan
    run: RunDir | None = None
    summary: Summary | None = None
    was_complete: bool = False

    @property
    def exit_code(self) -> ExitCode:
        """4 after a failed verification, 6 if a point is not to be trusted, else 0."""
        rows = self.summary.rows if self.summary else []
        if any(row["verify"] == "failed" for row in rows):
            return ExitCode.REJECTED
        doubtful = any(row["status"] in ("unstable", "invalid", "failing", "lost") for row in rows)
        return ExitCode.UNTRUSTED if doubtful else ExitCode.OK


def run_bench(settings: BenchSettings, on_progress: OnProgress) -> BenchReport:
    """Measure the grid of `settings`, or go on with an earlier run of it.

    Raises:
        GrinfError: Settings, model, catalogue or engine that cannot be used; nothing is measured then.
    """
    plan = make_plan(settings)
    if settings.dry_run:
        return BenchReport(plan)
    earlier = RunDir.newest(settings.output, plan.config_hash) if settings.resume else None
    spelled = plan.settings.spelled()
    run = earlier or RunDir.create(settings.output, settings.name, plan.config_hash, spelled)
    with run.locked():
        if earlier is None:
            terms = {key: getattr(plan, key) for key in ("preset", "rival", "config_hash")}
            terms |= {"sla": [str(sla) for sla in settings.sla], "arrival": settings.arrival}
            terms |= {"started_utc": datetime.now(UTC).isoformat(timespec="seconds")}
            terms |= {"devices": len(settings.devices)}
            run.append("run", **terms, points=[asdict(point) for point in plan.points])
        sweep = _Sweep(plan, run, on_progress)
        was_complete = not sweep.todo
        try:
            sweep.measure()
        except GrinfError:
            if not read_journal(run).records:
                shutil.rmtree(run.path)  # nothing was measured: leave nothing
            raise
        summary = summarise(run)
        write_summary(run, summary)
    return BenchReport(plan, run, summary, was_complete)


def block_seconds(preset: str) -> float:
    """How long an engine has its turn, at least."""
    return 1.0 if preset == "smoke" else 5.0


class _Sweep:
    """One session of measuring: skips what the journal has."""

    def __init__(self, plan: Plan, run: RunDir, on_progress: OnProgress) -> None:
        self.plan, self.run, self.on_progress = plan, run, on_progress
        self.clock = VirtualClock() if plan.is_virtual else Clock()
        self.deadline_ns = math.inf if plan.budget_ns is None else self.clock.now_ns() + plan.budget_ns
        self.journal = read_journal(run)
        self.todo = [point for point in plan.points if ("done", point.key) not in self.journal.said]

    def measure(self) -> None:
        """Measure what is left, until the budget ends."""
        devices = () if self.plan.is_virtual else self.plan.settings.devices
        earlier = self.run.read_json("env.json").get("engines", {})
        environment = describe_environment(devices) | {"engines": earlier}
        try:
            for _, group in groupby(tuple(self.todo), key=lambda point: replace(point, input_len=0)):
                points = list(group)
                self.run.write_json("env.json", environment)
                with self._opened(self.plan.settings.engine, points[0]) as opened:
                    environment["engines"][points[0].key] = opened.engine.describe()
                    self.run.write_json("env.json", environment)
                    self._check(opened, points)
                    (self._interleave if self.plan.rival else self._search)(opened, points)
        except BudgetSpent:
            return

    @contextmanager
    def _opened(self, spec: str, point: Point) -> Generator[OpenEngine]:
        if self.clock.now_ns() >= self.deadline_ns:
            raise BudgetSpent
        stage = f"open {point.key}"
        self.on_progress(stage, 0, 1)
        opened = open_engine(self.plan.settings, spec, point, self.clock)
        self.on_progress(stage, 1, 1)
        try:
            yield opened
        finally:
            opened.engine.close()

    def _check(self, opened: OpenEngine, points: list[Point]) -> None:
        """Before an engine is measured: its prompts fit, and its answers are right at every length.

        Raises:
            UsageError: A prompt is longer than the engine takes.
        """
        longest, limit = max(point.input_len for point in points), opened.max_context
        if limit is not None and longest > limit:
            what = f"--input-len {longest} is longer than the {limit} tokens that {points[0].engine} takes"
            raise UsageError(what, "the model's positions and --max-context limit a prompt", "ask less")
        count, said = self.plan.settings.verify, self.journal.said
        todo = [point for point in points if ("verify", point.key) not in said]
        if count < 1 or not todo:
            return
        rng = np.random.default_rng(points[0].seed(self.plan.settings.seed, -1))
        prompts = [random_prompts(point.input_len, opened.engine.vocab_rows, rng) for point in todo]
        groups = [
            [Request(first + i, prompt(i)) for i in range(count)]
            for first, prompt in zip(range(0, count * len(todo), count), prompts, strict=True)
        ]
        for point, report in zip(todo, verify(opened, groups), strict=True):
            self.run.append("verify", point=point.key, status=report.status, **asdict(report))

    def _search(self, opened: OpenEngine, points: list[Point]) -> None:
        open_loop = self.plan.settings.arrival == "poisson"
        for point in points:
            run, choose = self._prober(opened, point).run, partial(self._choose_preset, point)
            try:
                Search(run, self.plan.settings.sla, opened.max_batch, choose, open_loop).find()
            except BudgetSpent:
                if self.clock.now_ns() >= self.deadline_ns:
                    raise
                self.todo.remove(point)  # its share is spent, the time of the others is not
            else:
                self._finish(point)

    def _interleave(self, first: OpenEngine, points: list[Point]) -> None:
        """Let two engines take turns, ABBA, on the same prompts: drift of the machine hits both alike."""
        settings, rival = self.plan.settings, self.plan.rival
        seconds = block_seconds(self.plan.preset)
        with nullcontext(first) if settings.aa else self._opened(rival, points[0]) as second:
            if second is not first:
                self._check(second, [point.of(rival) for point in points])
            callers = 2 * min(first.max_batch, second.max_batch)
            warmup = ProbeSpec(Stage.WARMUP, 50, concurrency=callers, min_s=seconds / 2, max_s=2 * seconds)
            block = replace(warmup, stage=Stage.BLOCK, min_s=seconds)
            for point in points:
                pair = [self._prober(first, point), self._prober(second, point.of(rival))]
                for turn in range(settings.interleave + 1):
                    for prober in pair if turn % 2 else reversed(pair):
                        prober.run(block if turn else warmup)
                self._finish(point)

    def _prober(self, opened: OpenEngine, point: Point) -> Prober:
        settings, trie = self.plan.settings, opened.trie
        digest = trie.content_digest if trie is not None else ""
        asked = (opened.engine.levels, opened.engine.vocab_rows, settings.seed, settings.arrival)
        facts = [] if self.plan.is_virtual else model_facts(settings.model)
        start = {"workload_hash": _hash([point.work, digest, *asked]), "model_hash": _hash(facts)}
        earlier = start | self.journal.said.get(("start", point.key), {})
        if any(earlier[name] != value for name, value in start.items()):
            why = f"the model or the catalogue of {point.key} is another one than when the run began"
            raise UsageError(f"cannot resume {self.run.path}", why, "start a new run, without --resume")
        self.run.append("start", point=point.key, **start)

        def finish(result: RecallResult) -> object:
            return None if trie is None or result.leaves is None else trie.items(result.leaves)

        def on_probe(probe: Probe) -> None:
            self.on_progress(f"{point.key} {probe.record.stage}", probe.record.probe_id + 1, None)

        return Prober(
            point=point,
            engine=opened.engine,
            clock=self.clock,
            run_dir=self.run,
            slas=settings.sla,
            seed=settings.seed,
            earlier=iter(self.journal.records.get(point.key, [])),
            deadline_ns=min(self.deadline_ns, self.clock.now_ns() + 1.5 * self._share_ns()),
            finish=finish,
            on_probe=on_probe,
        )

    def _choose_preset(self, point: Point, capacity: float) -> Preset:
        """The wanted preset, or the best one below it whose share of the remaining time suffices."""
        if told := self.journal.said.get(("preset", point.key)):
            return PRESETS[told["preset"]]
        names = list(PRESETS)
        allowed = [PRESETS[name] for name in names[: names.index(self.plan.preset) + 1]]
        share_s = self._share_ns() / SECOND
        fitting = [preset for preset in allowed if preset.requests / (0.7 * capacity) <= share_s]
        chosen = (fitting or allowed[:1])[-1]
        self.run.append("preset", point=point.key, preset=chosen.name)
        return chosen

    def _share_ns(self) -> float:
        """What is left of the budget, divided among the points that are left."""
        return (self.deadline_ns - self.clock.now_ns()) / len(self.todo)

    def _finish(self, point: Point) -> None:
        self.todo.remove(point)
        self.run.append("done", point=point.key)
        self.on_progress("points", len(self.plan.points) - len(self.todo), len(self.plan.points))


def _hash(facts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
