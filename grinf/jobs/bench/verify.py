"""Correct before fast: an engine's answers against float32 teacher forcing with its own weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from grinf.backend.interface import EngineOptions
from grinf.jobs.bench.engines import OpenEngine
from grinf.state.request import RecallResult, Request
from grinf.trie import Trie

if TYPE_CHECKING:
    from grinf.jobs.bench.teacher import Teacher

TOLERANCE = 2e-3
"""Nats that a score may be off in float32."""
NOISE, MEAN_NOISE = 3.0, 2.0
"""Times what its dtype does to the same scores elsewhere that the worst score, and the mean, may be off."""
FEW, FEW_TOLERANCE = 64, 0.25
"""SIDs below which that may be little by chance, and the nats that are allowed then."""
SLACK = 0.01
"""Share of beams that a narrower engine may miss beyond what another search of its dtype misses."""
HF_TOKENS = 100_000
"""Beams × prompt tokens up to which transformers is asked, too: it copies the prompt's keys per beam."""
HF_PROMPTS = 4
"""Prompts that transformers is asked at most."""

Answers = dict[int, np.ndarray]
"""SIDs int32 [n, levels] by request id."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What the engine's dtype does elsewhere, to one group of requests.

    Attributes:
        name: Who searched, as in `VerifyReport.yardstick`.
        sids: What they found.
        scores: The teacher's in that dtype, float32 [n], of the engine's SIDs.
    """

    name: str
    sids: Answers
    scores: dict[int, np.ndarray]


@dataclass(slots=True)
class VerifyReport:
    """What was checked, and what is wrong.

    Attributes:
        requests: Answers that were checked.
        faults: One line per fault.
        score_error: Largest difference to teacher forcing, nats; None: not compared.
        overlap: Mean share of the float32 search's beams that the engine returned, too; None: not compared.
        yardstick: Who else searched in the engine's dtype: `transformers`, `teacher`, or both, each for some
            prompts; empty: nobody had to.
        yardstick_overlap: Their mean share.
        top1: Share of requests whose best beam agrees.
        skipped: Why nothing was checked.
    """

    requests: int = 0
    faults: list[str] = field(default_factory=list[str])
    score_error: float | None = None
    overlap: float | None = None
    yardstick: str = ""
    yardstick_overlap: float | None = None
    top1: float | None = None
    skipped: str = ""

    @property
    def status(self) -> str:
        """`ok`, `failed` or `skipped`."""
        return "failed" if self.faults else "skipped" if self.skipped else "ok"


def verify(opened: OpenEngine, groups: Sequence[Sequence[Request]]) -> list[VerifyReport]:
    """Serve groups of requests, one for each length of a sweep, and check every answer; a report per group.

    As many beams as schedule and catalogue give must come back, legal, distinct, sorted, with finite scores;
    each score must be what teacher forcing gives for that SID, and no beam of an exact search may be missing
    but for rounding. In a narrower dtype the share of common beams must also reach what another search in
    that dtype reaches on the same prompts (transformers for a few of them, the teacher for the others), less
    what chance explains. Catalogues with short SIDs and searches with a score margin get the first of these
    checks only. Request ids are distinct across groups.
    """
    if opened.options is None:
        return [VerifyReport(skipped="a simulated engine has no answers") for _ in groups]
    results = serve(opened, [request for group in groups for request in group])
    reports: list[VerifyReport] = []
    for group in groups:
        told = [(request.request_id, _faults(results.get(request.request_id), opened)) for request in group]
        faults = [f"request {number}: {fault}" for number, found in told for fault in found]
        reports.append(VerifyReport(len(group), faults))
    short = opened.trie is not None and any(end is not None for end in opened.trie.end_codes)
    if any(report.faults for report in reports) or short or opened.options.score_margin is not None:
        return reports
    import torch

    try:
        _compare(opened, groups, results, reports)
    except torch.OutOfMemoryError:
        for report in reports:
            report.skipped = "no memory beside the engine for float32 weights; lower --memory-fraction"
    return reports


def serve(opened: OpenEngine, requests: Sequence[Request]) -> dict[int, RecallResult]:
    """Answers by request id."""
    results: dict[int, RecallResult] = {}
    for request in requests:
        opened.engine.submit(request)
    while not opened.engine.is_idle:
        results |= {result.request_id: result for result in opened.engine.step()}
    return results


def _faults(result: RecallResult | None, opened: OpenEngine) -> list[str]:
    """What is wrong with an answer by itself; an engine that only tells SIDs is excused from the rest."""
    if result is None or result.error is not None or not len(result.sids):
        why = "lost" if result is None else result.error.what if result.error else "zero beams"
        return [f"no answer: {why}"]
    assert opened.options is not None
    least, most = beams_due(opened.options, opened.trie, opened.engine.levels, opened.engine.vocab_rows)
    n, trie, scores = len(result.sids), opened.trie, result.scores
    leaves = np.zeros(n) if trie is None else trie.leaf_of(result.sids)
    expected = f"{least}" if least == most else f"{least} to {most}"
    wrong = {
        f"{n} beams came back, {expected} are due": not least <= n <= most,
        "a SID is returned twice": len(np.unique(result.sids, axis=0)) < n,
        "a SID is not in the catalogue": bool((leaves < 0).any()),
    }
    if not opened.sids_only:
        wrong |= {
            "there is no score for each SID": len(scores) != n,
            "a score is not finite": not np.isfinite(scores).all(),
            "beams are not sorted by score": not (scores[:-1] >= scores[1:]).all(),
            "a SID has another's items": trie is not None
            and (result.leaves is None or not np.array_equal(leaves, result.leaves)),
        }
    return [fault for fault, holds in wrong.items() if holds]


def beams_due(options: EngineOptions, trie: Trie | None, levels: int, vocab_rows: int) -> tuple[int, int]:
    """Fewest and most beams that a right answer can have.

    They differ only where a catalogue has fewer continuations than the schedule wants: then it depends on
    which beams went before.
    """
    least = most = 1
    for level in range(levels):
        width = options.beams[min(level, len(options.beams) - 1)]
        if trie is None:
            children = np.full(most, vocab_rows)
        else:
            children = np.diff(trie.child_ptr[level - 1]) if level else np.array([trie.num_nodes[0]])
        children = np.sort(children.astype(np.int64))
        most = min(width, int(children[-most:].sum()))
        if options.score == "topk":  # It keeps K at least; ties are kept, too.
            children = np.minimum(children, options.score_k or width)
        least = min(width, int(children[:least].sum()))
    return (1 if options.score_margin is not None else least), most


def _compare(
    opened: OpenEngine,
    groups: Sequence[Sequence[Request]],
    results: dict[int, RecallResult],
    reports: Sequence[VerifyReport],
) -> None:
    """Compare scores and beams with the teacher's."""
    from grinf.jobs.bench.teacher import Teacher

    assert opened.options is not None
    teacher = Teacher(opened.options, opened.trie, widen=False)
    others: Sequence[Yardstick | None] = [None] * len(groups)
    if teacher.dtype != "float32":
        others = _search_again(teacher, opened, groups, results)
        del teacher  # Its weights make room for wider ones.
        teacher = Teacher(opened.options, opened.trie)
    for group, report, other in zip(groups, reports, others, strict=True):
        own = {request.request_id: results[request.request_id] for request in group}
        exact = {r.request_id: teacher.scores(r.input_ids, own[r.request_id].sids) for r in group}
        slack = _judge_scores(own, exact, other, report, told=not opened.sids_only)
        sids = {number: result.sids for number, result in own.items()}
        report.overlap, report.top1, missed = _overlap(teacher, group, sids, slack)
        if missed > slack and (other is None or opened.options.score != "topk"):
            what = f"a beam is missing that lies {missed:.3g} nats above the border"
            report.faults.append(f"{what}; rounding explains {slack:.3g}")
        if other is not None:
            report.yardstick = other.name
            report.yardstick_overlap, _, _ = _overlap(teacher, group, other.sids, slack)
            beams = sum(map(len, sids.values()))
            least = least_overlap(report.overlap, report.yardstick_overlap, beams)
            if not report.overlap >= least:
                what = f"{report.overlap:.4f} of the exact beams were found; {least:.4f} must be"
                report.faults.append(what)


def _judge_scores(
    results: dict[int, RecallResult],
    exact: dict[int, np.ndarray],
    other: Yardstick | None,
    report: VerifyReport,
    *,
    told: bool,
) -> float:
    """Report what is wrong with an engine's scores; returns nats by which rounding may part two beams."""
    right = np.concatenate([exact[number] for number in results])
    ours = np.concatenate([result.scores for result in results.values()]) if told else right
    known, worst, mean, noise = np.ones(len(right), bool), TOLERANCE, TOLERANCE, TOLERANCE
    if other is not None:
        theirs = np.concatenate([other.scores[number] for number in results])
        known = np.isfinite(right) & np.isfinite(theirs)  # Rounding may move a SID over the border of top-K.
        usual = np.abs(theirs[known] - right[known])
        least = FEW_TOLERANCE if len(usual) < FEW else 0.0
        noise = max(least / NOISE, float(usual.max(initial=0.0)))
        worst, mean = NOISE * noise, max(least, MEAN_NOISE * float(usual.sum()) / max(1, len(usual)))
    if told:
        errors = np.abs(ours[known] - right[known])
        report.score_error = float(errors.max(initial=0.0))
        if not report.score_error <= worst:
            report.faults.append(f"a score is {report.score_error:.3g} nats off; {worst:.3g} are allowed")
        elif len(errors) and not errors.mean() <= mean:
            what = f"scores are {errors.mean():.3g} nats off; {mean:.3g} are allowed on average"
            report.faults.append(what)
        if other is None:
            noise = max(1e-5, min(report.score_error, TOLERANCE))
    return NOISE * noise


def least_overlap(reached: float, yardstick: float, beams: int) -> float:
    """Share of `beams` exact beams that an engine must find where another search finds `yardstick`.

    Two searches that round differently miss different beams, each about a Poisson number of them: three
    standard deviations of the difference, estimated from what both miss, are chance.
    """
    return yardstick - SLACK - 3 * math.sqrt((2 - reached - yardstick) * beams) / beams


def _overlap(
    teacher: "Teacher", requests: Sequence[Request], found: Answers, slack: float
) -> tuple[float, float, float]:
    """How near a search came to the exact one, which decides near ties as the former did.

    Returns:
        Mean share of the exact beams that were found, share of requests with the same best beam, and how many
        nats the surest of the missing beams lies above a border.
    """
    shares, firsts, missed = list[float](), list[bool](), 0.0
    for request in requests:
        answer = found[request.request_id]
        exact, lost, over = _missing(teacher, request, answer, slack)
        shares.append(1 - float(lost.mean()))
        firsts.append(len(answer) > 0 and bool((answer[0] == exact[0]).all()))
        missed = max(missed, over)
    return float(np.mean(shares)), float(np.mean(firsts)), missed


def _missing(
    teacher: "Teacher", request: Request, answer: np.ndarray, slack: float, away: Sequence[np.ndarray] = ()
) -> tuple[np.ndarray, np.ndarray, float]:
    """The exact beams, which of them an answer lacks, and the most that one of these lies above a border."""
    exact, clear = teacher.search(request.input_ids, answer, away, slack)
    ours = set(map(tuple, answer.tolist()))
    lost = np.array([sid not in ours for sid in map(tuple, exact.tolist())])
    over = float(clear[lost].max(initial=0.0))
    if over > slack and not len(away):  # The answer may have dropped at a near tie what they come from.
        return _missing(teacher, request, answer, slack, list(exact[lost]))
    return exact, lost, over


def _search_again(
    narrow: "Teacher",
    opened: OpenEngine,
    groups: Sequence[Sequence[Request]],
    results: dict[int, RecallResult],
) -> list[Yardstick]:
    """Another search in the engine's dtype: by transformers where it was asked, else by the teacher."""
    assert opened.options is not None
    found = _ask_transformers(opened.options, opened.trie, groups)
    yardsticks: list[Yardstick] = []
    for group in groups:
        own = {r.request_id: found[r.request_id] for r in group if r.request_id in found}
        names = ["transformers"] * bool(own) + ["teacher"] * (len(own) < len(group))
        own |= {r.request_id: narrow.search(r.input_ids)[0] for r in group if r.request_id not in own}
        scores = {r.request_id: narrow.scores(r.input_ids, results[r.request_id].sids) for r in group}
        yardsticks.append(Yardstick(" and ".join(names), own, scores))
    return yardsticks


def _ask_transformers(
    options: EngineOptions, trie: Trie | None, groups: Sequence[Sequence[Request]]
) -> Answers:
    """What transformers finds for a few prompts of each group; empty: it cannot search like that."""
    from grinf.jobs.bench.hf import HfEngine

    most = HF_TOKENS // max(options.beams)
    fitting = [[request for request in group if request.context_len <= most] for group in groups]
    asked = [Request(r.request_id, r.input_ids) for fits in fitting for r in fits[:HF_PROMPTS]]
    if not asked or not HfEngine.can_search(options):
        return {}
    baseline = OpenEngine(HfEngine(options, trie), 1, trie, options, sids_only=True)
    found = serve(baseline, asked)
    baseline.engine.close()
    return {number: result.sids for number, result in found.items() if result.error is None}
