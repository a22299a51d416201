"""Correct before fast: an engine's answers against float32 teacher forcing with its own weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from grinf.jobs.bench.engines import OpenEngine
from grinf.state.request import RecallResult, Request
from grinf.trie import Trie

if TYPE_CHECKING:
    from grinf.jobs.bench.teacher import Teacher

TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.25}
"""Nats that the sum of a SID's log-probabilities may be off, by compute dtype."""
LEAST_OVERLAP = 0.99
"""Share of the exact beams that a float32 engine must return; ties at the border may go either way."""
HF_TOKENS = 100_000
"""Beams × prompt tokens up to which transformers is asked, too: it copies the prompt's keys per beam."""


@dataclass(slots=True)
class VerifyReport:
    """What was checked, and what is wrong.

    Attributes:
        requests: Answers that were checked.
        faults: One line per fault.
        score_error: Largest difference to teacher forcing, nats; None: not compared.
        overlap: Mean share of the float32 search's beams that the engine returned, too; None: not compared.
        hf_overlap: The same for transformers in the engine's dtype; None: not run.
        top1: Share of requests whose best beam agrees.
        skipped: Why nothing was checked.
    """

    requests: int = 0
    faults: list[str] = field(default_factory=list[str])
    score_error: float | None = None
    overlap: float | None = None
    hf_overlap: float | None = None
    top1: float | None = None
    skipped: str = ""

    @property
    def status(self) -> str:
        """`ok`, `failed` or `skipped`."""
        return "skipped" if self.skipped else "failed" if self.faults else "ok"


def verify(opened: OpenEngine, requests: Sequence[Request]) -> VerifyReport:
    """Serve requests and check every answer.

    Beams must be legal, distinct and sorted; each score must be what teacher forcing gives for that SID. In
    float32 the beams must be those of an exact search. In a narrower dtype rounding alone moves the tail: the
    share of common beams must reach what transformers in that dtype reaches, less 0.01. Catalogues with short
    SIDs and searches with a score margin get the first of these checks only.
    """
    if opened.options is None:
        return VerifyReport(skipped="a simulated engine has no answers")
    results = serve(opened, requests)
    told = [
        (request, fault)
        for request in requests
        for fault in _faults(results[request.request_id], opened.trie)
    ]
    report = VerifyReport(
        len(requests), [f"request {request.request_id}: {fault}" for request, fault in told]
    )
    short = opened.trie is not None and any(end is not None for end in opened.trie.end_codes)
    if report.faults or short or opened.options.score_margin is not None:
        return report
    import torch

    try:
        _compare(opened, requests, results, report)
    except torch.OutOfMemoryError:
        report.skipped = "no memory beside the engine for float32 weights; lower --memory-fraction"
    return report


def serve(opened: OpenEngine, requests: Sequence[Request]) -> dict[int, RecallResult]:
    """Answers by request id."""
    results: dict[int, RecallResult] = {}
    for request in requests:
        opened.engine.submit(request)
    while not opened.engine.is_idle:
        results |= {result.request_id: result for result in opened.engine.step()}
    return results


def _faults(result: RecallResult, trie: Trie | None) -> list[str]:
    if result.error is not None or not result.beams_returned:
        return [f"no answer: {result.error.what if result.error else 'zero beams'}"]
    leaves = np.zeros(len(result.sids)) if trie is None else trie.leaf_of(result.sids)
    wrong = {
        "a SID is returned twice": len(np.unique(result.sids, axis=0)) < len(result.sids),
        "beams are not sorted by score": bool((np.diff(result.scores) > 0).any()),
        "a SID is not in the catalogue": bool((leaves < 0).any()),
        "a SID has another's items": result.leaves is not None and not np.array_equal(leaves, result.leaves),
    }
    return [fault for fault, holds in wrong.items() if holds]


def _compare(
    opened: OpenEngine, requests: Sequence[Request], results: dict[int, RecallResult], report: VerifyReport
) -> None:
    """Compare scores and beams with the teacher's."""
    from grinf.jobs.bench.teacher import Teacher

    assert opened.options is not None
    teacher = Teacher(opened.options, opened.trie)
    is_exact = teacher.dtype == "float32"
    errors, overlaps, firsts = [0.0], list[float](), list[bool]()
    for request in requests:
        result, exact = results[request.request_id], teacher.search(request.input_ids)
        if np.isfinite(result.scores).all():  # transformers does not tell scores
            expected = teacher.scores(request.input_ids, result.sids)
            known = (
                np.isfinite(expected) | is_exact
            )  # rounding may move a SID over the border of top-K scores
            errors.append(np.abs(result.scores - expected)[known].max(initial=0.0))
        overlaps.append(_overlap(result.sids, exact))
        firsts.append(bool((result.sids[0] == exact[0]).all()))
    report.score_error, limit = float(max(errors)), TOLERANCE[teacher.dtype]
    report.overlap, report.top1 = float(np.mean(overlaps)), float(np.mean(firsts))
    report.hf_overlap = None if is_exact else _hf_overlap(opened, requests, teacher)
    least = LEAST_OVERLAP if is_exact else (report.hf_overlap or 0.0) - 0.01
    if not report.score_error <= limit:
        report.faults.append(f"a score is {report.score_error:.3g} nats off; {teacher.dtype} allows {limit}")
    if report.overlap < least:
        report.faults.append(f"{report.overlap:.4f} of the exact beams were found; {least:.4f} must be")


def _overlap(found: np.ndarray, exact: np.ndarray) -> float:
    return len(set(map(tuple, found.tolist())) & set(map(tuple, exact.tolist()))) / max(1, len(exact))


def _hf_overlap(opened: OpenEngine, requests: Sequence[Request], teacher: "Teacher") -> float | None:
    """How much of the exact answer transformers finds in the same dtype, where it fits."""
    from grinf.jobs.bench.hf import HfEngine

    assert opened.options is not None
    options, widest = opened.options, max(opened.options.beams)
    fits = [Request(r.request_id, r.input_ids) for r in requests if widest * r.context_len <= HF_TOKENS][:4]
    if len(set(options.beams)) > 1 or options.score != "vocab" or not fits:
        return None
    baseline = OpenEngine(HfEngine(options, opened.trie), 1, opened.trie, options)
    found = serve(baseline, fits)
    baseline.engine.close()
    answered = [request for request in fits if found[request.request_id].error is None]
    shares = [_overlap(found[r.request_id].sids, teacher.search(r.input_ids)) for r in answered]
    return float(np.mean(shares)) if shares else None
