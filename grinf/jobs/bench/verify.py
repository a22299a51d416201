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

TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.25}
"""Nats that the sum of a SID's log-probabilities may be off, by compute dtype."""
LEAST_OVERLAP = 0.99
"""Share of the exact beams that a float32 engine must return; ties at the border may go either way."""
SLACK = 0.01
"""Share of beams that a narrower engine may miss beyond what another search of its dtype misses."""
HF_TOKENS = 100_000
"""Beams × prompt tokens up to which transformers is asked, too: it copies the prompt's keys per beam."""
HF_PROMPTS = 4
"""Prompts that transformers is asked at most."""

Answers = dict[int, np.ndarray]
"""SIDs int32 [n, levels] by request id."""


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
        return "skipped" if self.skipped else "failed" if self.faults else "ok"


def verify(opened: OpenEngine, groups: Sequence[Sequence[Request]]) -> list[VerifyReport]:
    """Serve groups of requests, one for each length of a sweep, and check every answer; a report per group.

    As many beams as schedule and catalogue give must come back, legal, distinct, sorted, with finite scores;
    each score must be what teacher forcing gives for that SID. In float32 the beams must be those of an exact
    search. In a narrower dtype rounding alone moves the tail: the share of common beams must reach what
    another search in that dtype reaches on the same prompts (transformers for a few of them, the teacher
    itself for the others and where transformers cannot be asked), less what chance explains. Catalogues with
    short SIDs and searches with a score margin get the first of these checks only. Request ids are distinct
    across groups.
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
    teacher = Teacher(opened.options, opened.trie)
    dtype, found = teacher.dtype, {number: result.sids for number, result in results.items()}
    exact = {request.request_id: teacher.search(request.input_ids) for group in groups for request in group}
    for group, report in zip(groups, reports, strict=True):
        report.overlap = _overlap(found, exact, group)
        firsts = [(found[r.request_id][0] == exact[r.request_id][0]).all() for r in group]
        report.top1 = float(np.mean(firsts))
        if not opened.sids_only:
            errors = [_score_error(teacher, request, results[request.request_id]) for request in group]
            report.score_error = max(errors)
            if not report.score_error <= TOLERANCE[dtype]:
                allowed = f"{dtype} allows {TOLERANCE[dtype]}"
                report.faults.append(f"a score is {report.score_error:.3g} nats off; {allowed}")
    del teacher  # Its weights make room for those of the yardstick.
    others = None if dtype == "float32" else _search_again(opened, groups)
    for number, (group, report) in enumerate(zip(groups, reports, strict=True)):
        reached, least = report.overlap or 0.0, LEAST_OVERLAP
        if others is not None:
            report.yardstick, answers = others[number]
            report.yardstick_overlap = _overlap(answers, exact, group)
            beams = sum(len(exact[request.request_id]) for request in group)
            least = least_overlap(reached, report.yardstick_overlap, beams)
        if not reached >= least:
            report.faults.append(f"{reached:.4f} of the exact beams were found; {least:.4f} must be")


def least_overlap(reached: float, yardstick: float, beams: int) -> float:
    """Share of `beams` exact beams that an engine must find where another search finds `yardstick`.

    Two searches that round differently miss different beams, each about a Poisson number of them: three
    standard deviations of the difference, estimated from what both miss, are chance.
    """
    return yardstick - SLACK - 3 * math.sqrt((2 - reached - yardstick) * beams) / beams


def _score_error(teacher: "Teacher", request: Request, result: RecallResult) -> float:
    expected = teacher.scores(request.input_ids, result.sids)
    known = np.isfinite(expected) | (teacher.dtype == "float32")
    # In a narrow dtype rounding may move a SID over the border of top-K scores.
    return float(np.abs(result.scores - expected)[known].max(initial=0.0))


def _overlap(found: Answers, exact: Answers, requests: Sequence[Request]) -> float:
    """Mean share of the exact beams that were found."""
    rows = [[set(map(tuple, side[r.request_id].tolist())) for side in (found, exact)] for r in requests]
    return float(np.mean([len(ours & right) / len(right) for ours, right in rows]))


def _search_again(opened: OpenEngine, groups: Sequence[Sequence[Request]]) -> list[tuple[str, Answers]]:
    """Another search in the engine's dtype: by transformers where it was asked, else by the teacher."""
    from grinf.jobs.bench.teacher import Teacher

    assert opened.options is not None
    found, narrow = _ask_transformers(opened.options, opened.trie, groups), None
    answers: list[tuple[str, Answers]] = []
    for group in groups:
        own = {r.request_id: found[r.request_id] for r in group if r.request_id in found}
        names = ["transformers"] * bool(own) + ["teacher"] * (len(own) < len(group))
        for request in (request for request in group if request.request_id not in own):
            narrow = narrow or Teacher(opened.options, opened.trie, widen=False)
            own[request.request_id] = narrow.search(request.input_ids)
        answers.append((" and ".join(names), own))
    return answers


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
