"""Answers a unit: prompts, engine, items, metrics, one table. Knows no output path: it can run anywhere."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from grinf import __version__
from grinf.config.parse import format_beams
from grinf.errors import RowError
from grinf.jobs.recall.answers import Answers, gather, to_table
from grinf.jobs.recall.bootstrap import draw_weights, spell_sums
from grinf.jobs.recall.columns import values
from grinf.jobs.recall.filters import UnitFilters
from grinf.jobs.recall.metrics import Sums, measure
from grinf.jobs.recall.plan import Plan
from grinf.jobs.recall.rejects import to_rejects
from grinf.jobs.recall.report import SHOWN_ERRORS
from grinf.jobs.recall.sid_lookup import Named
from grinf.jobs.recall.tokenizer import Prompt
from grinf.jobs.recall.units import Unit
from grinf.runtime.engine import Engine
from grinf.state.request import RecallResult, Request

OnProgress = Callable[[str, int, int | None], None]
ServeRequests = Callable[[Iterable[Request]], Iterator[RecallResult]]

FIXES = {
    "overlong": "shorten it; --max-context raises the limit, as far as the model goes",
    "empty_input": "--template or --suffix gives every prompt tokens",
}


class Answered(NamedTuple):
    """A unit's answers.

    Attributes:
        table: Rows of the output, in input order.
        rejects: Rows of the input that have no answer; None: there are none.
        counts: What `summarise` adds up.
    """

    table: pa.Table
    rejects: pa.Table | None
    counts: dict[str, Any]


@dataclass(slots=True)
class _Progress:
    """Queries and prompt tokens that are done, and those of the units that were read so far."""

    queries: int = 0
    tokens: int = 0
    seen_queries: int = 0
    seen_tokens: int = 0


class UnitWorker:
    """Answers units with an engine.

    An answer depends on the rows of its unit alone, not on time or on what ran before: a unit that is done
    again, anywhere, gives the same answers.

    Args:
        plan: The job.
        serve: `Engine.run` of the engine to use.
        total: Queries to answer, for the progress.
        on_progress: See `run_recall`.
    """

    def __init__(self, plan: Plan, serve: ServeRequests, total: int, on_progress: OnProgress) -> None:
        self._plan, self._serve_requests = plan, serve
        self._total, self._on_progress = total, on_progress
        self._progress = _Progress()

    def answer(
        self, unit: Unit, queries: pa.Table, refusal: RowError | None = None
    ) -> Callable[[], Answered]:
        """Answer the rows of a unit; every one with `refusal`, if there is one.

        Returns:
            Makes the tables, without the engine: while that answers the next unit, in another thread.

        Raises:
            RowError: A query without an answer, with `--on-error fail`.
            RuntimeError, MemoryError: Memory ran out; the unit can be answered again.
        """
        before = replace(self._progress)
        try:
            return self._answer(unit, queries, refusal)
        except (RuntimeError, MemoryError):
            self._progress = before  # The attempt counts for nothing.
            raise

    def _answer(self, unit: Unit, queries: pa.Table, refusal: RowError | None) -> Callable[[], Answered]:
        plan, settings = self._plan, self._plan.settings
        refused = None if refusal is None else [refusal] * len(queries)
        prompts = refused or plan.prompter(queries[plan.columns.input])
        truth = None if plan.truth is None else plan.truth.read(queries[plan.columns.truth])
        filters = None if plan.filters is None else plan.filters.open(queries, plan.truth, truth)
        outcomes = self._serve(prompts, filters)
        errors = [self._locate(one, unit, row, queries) for row, one in enumerate(outcomes)]
        if settings.on_error == "fail":
            for error in filter(None, errors):
                raise error
        kept = None if filters is None else filters.kept
        seen, unknown = (truth, 0) if filters is None else (filters.truth, filters.unknown)

        def finish() -> Answered:
            answers = gather(outcomes, plan.levels, settings.top_k, plan.trie, settings.expand, kept)
            table = to_table(unit, queries, plan.columns, answers, errors, plan.schema)
            counts = self._count(unit, seen, answers, errors) | _sid_mass(outcomes)
            return Answered(table, to_rejects(unit, queries, errors), counts | {"unknown_items": unknown})

        return finish

    def _serve(self, prompts: Sequence[Prompt], filters: UnitFilters | None) -> list[RecallResult | RowError]:
        """Run the engine over a unit, longest prompts first, so that a batch holds like lengths."""
        good = {row: prompt for row, prompt in enumerate(prompts) if not isinstance(prompt, RowError)}
        self._progress.seen_queries += len(prompts)
        self._progress.seen_tokens += sum(map(len, good.values()))
        self._advance(len(prompts) - len(good), 0)

        def requests() -> Iterator[Request]:
            for row in sorted(good, key=lambda row: -len(good[row])):
                input_ids = good[row].tolist()
                yield Request(row, input_ids) if filters is None else filters.request(row, input_ids)

        outcomes: list[Any] = list(prompts)
        for result in self._serve_requests(requests()):
            outcomes[result.request_id] = result.error or result
            if filters is not None:
                filters.finish(result, self._plan.settings.top_k)
            self._advance(1, len(good[result.request_id]))
        return outcomes

    def _advance(self, queries: int, tokens: int) -> None:
        """Tell the progress; the tokens of units that were not read yet are taken from the mean so far."""
        progress = self._progress
        progress.queries += queries
        progress.tokens += tokens
        unseen = self._total - progress.seen_queries
        tokens_in_all = progress.seen_tokens + unseen * progress.seen_tokens // progress.seen_queries
        self._on_progress("queries", progress.queries, self._total)
        self._on_progress("prompt tokens", progress.tokens, tokens_in_all)

    def _locate(self, outcome: object, unit: Unit, row: int, queries: pa.Table) -> RowError | None:
        """Add to an error where it happened, and what helps against it."""
        if not isinstance(outcome, RowError):
            return None
        columns = self._plan.columns
        ids = values(queries[columns.query_id].slice(row, 1)) if columns.query_id else ()
        query = "".join(f" (query_id={value!r})" for value in ids if not isinstance(value, RowError))
        what = f"row {unit.first_row + row}{query}, column {columns.input!r}: {outcome.what}"
        return RowError(outcome.code, what, outcome.why, outcome.fix or FIXES.get(outcome.code, ""))

    def _count(
        self, unit: Unit, truth: Named | None, answers: Answers, errors: Sequence[RowError | None]
    ) -> dict[str, Any]:
        plan, failed = self._plan, [error for error in errors if error is not None]
        sums = Sums()
        if truth is not None:
            is_failed = np.array([error is not None for error in errors], bool)
            weights = draw_weights(unit.first_row, unit.num_rows)
            sums = measure(answers, is_failed, truth, plan.cutoffs, plan.item_cutoffs, weights)
        return {
            "rows": len(errors),
            "ok": len(errors) - len(failed),
            "errors": Counter(error.code for error in failed),
            "examples": [error.what for error in failed[:SHOWN_ERRORS]],
            "sids": len(answers.scores),
            "items": len(answers.item_sid),
            "sums": sums.total,
            "resampled": {name: spell_sums(values) for name, values in sums.resampled.items()},
        }


def _sid_mass(outcomes: Sequence[object]) -> dict[str, float]:
    """Sum of the probability that level 0 gave to SIDs, and of how many queries it is known."""
    found = [one.sid_mass for one in outcomes if isinstance(one, RecallResult) and one.sid_mass is not None]
    return {"sid_mass": math.fsum(found), "sid_mass_rows": len(found)}


def describe_search(plan: Plan, engine: Engine) -> dict[str, str]:
    """What the answers are answers of, for the metadata of files; nothing in it changes from run to run."""
    settings, running = plan.settings, engine.describe()
    margin = "" if settings.score_margin is None else f" within {settings.score_margin} nats"
    return {
        "version": __version__,
        "model": str(settings.model),
        "trie": "" if plan.trie is None else str(settings.trie),
        "trie_digest": "" if plan.trie is None else plan.trie.content_digest,
        "trie_version": "" if plan.trie is None else plan.trie.version,
        "view": settings.view or "",
        "view_digest": "" if plan.filters is None else plan.filters.view_digest,
        "beams": format_beams(settings.beams) + margin,
        "score": str(settings.score),
        "levels": str(plan.levels),
        # Of `cuda:1 (NAME)` the name: which one of several answered is no property of the answers.
        "device": running["device"].partition(" (")[2].removesuffix(")") or running["device"],
        "dtype": running["dtype"],
        "kernels": json.dumps(running["kernels"], sort_keys=True),
    }
