"""Answers a unit: prompts, engine, items, metrics, one table. Knows no output path: it can run anywhere."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from grinf import __version__
from grinf.config.parse import format_beams
from grinf.errors import RowError
from grinf.jobs.recall.answers import Answers, gather, to_table
from grinf.jobs.recall.columns import values
from grinf.jobs.recall.metrics import measure
from grinf.jobs.recall.plan import Plan
from grinf.jobs.recall.report import SHOWN_ERRORS
from grinf.jobs.recall.tokenizer import Prompt
from grinf.jobs.recall.units import Unit
from grinf.runtime.engine import Engine
from grinf.state.request import RecallResult, Request

OnProgress = Callable[[str, int, int | None], None]

FIXES = {
    "overlong": "shorten it; --max-context raises the limit, as far as the model goes",
    "empty_input": "--template or --suffix gives every prompt tokens",
}


class UnitWorker:
    """Answers units with an engine.

    An answer depends on the rows of its unit alone, not on time or on what ran before: a unit that is done
    again, anywhere, gives the same answers.

    Args:
        plan: The job.
        engine: Built from the plan.
        total: Queries to answer, for the progress.
        on_progress: See `run_recall`.
    """

    def __init__(self, plan: Plan, engine: Engine, total: int, on_progress: OnProgress) -> None:
        self._plan, self._engine = plan, engine
        self._total, self._on_progress = total, on_progress
        self._queries = self._tokens = self._seen_queries = self._seen_tokens = 0

    def answer(self, unit: Unit, queries: pa.Table) -> tuple[pa.Table, dict[str, Any]]:
        """Answer the rows of a unit.

        Returns:
            Rows of the output, in input order; and what the unit counted, for `summarise`.

        Raises:
            RowError: A query without an answer, with `--on-error fail`.
        """
        plan, settings = self._plan, self._plan.settings
        prompts = plan.prompter(queries[plan.columns.input])
        outcomes = self._serve(prompts)
        errors = [self._locate(one, unit, row, queries) for row, one in enumerate(outcomes)]
        if settings.on_error == "fail":
            for error in filter(None, errors):
                raise error
        answers = gather(outcomes, plan.levels, settings.top_k, plan.trie, settings.expand)
        table = to_table(unit, queries, plan.columns, answers, errors, plan.schema)
        return table, self._count(queries, answers, errors)

    def _serve(self, prompts: Sequence[Prompt]) -> list[RecallResult | RowError]:
        """Run the engine over a unit, longest prompts first, so that a batch holds like lengths."""
        good = {row: prompt for row, prompt in enumerate(prompts) if not isinstance(prompt, RowError)}
        self._seen_queries += len(prompts)
        self._seen_tokens += sum(map(len, good.values()))
        self._advance(len(prompts) - len(good), 0)

        def requests() -> Iterator[Request]:
            for row in sorted(good, key=lambda row: -len(good[row])):
                yield Request(row, good[row].tolist())

        outcomes: list[Any] = list(prompts)
        for result in self._engine.run(requests()):
            outcomes[result.request_id] = result.error or result
            self._advance(1, len(good[result.request_id]))
        return outcomes

    def _advance(self, queries: int, tokens: int) -> None:
        """Tell the progress; the tokens of units that were not read yet are taken from the mean so far."""
        self._queries += queries
        self._tokens += tokens
        unseen = self._total - self._seen_queries
        tokens_in_all = self._seen_tokens + unseen * self._seen_tokens // self._seen_queries
        self._on_progress("queries", self._queries, self._total)
        self._on_progress("prompt tokens", self._tokens, tokens_in_all)

    def _locate(self, outcome: object, unit: Unit, row: int, queries: pa.Table) -> RowError | None:
        """Add to an error where it happened, and what helps against it."""
        if not isinstance(outcome, RowError):
            return None
        columns = self._plan.columns
        ids = values(queries[columns.query_id].slice(row, 1)) if columns.query_id else ()
        query = "".join(f" (query_id={value!r})" for value in ids)
        what = f"row {unit.first_row + row}{query}, column {columns.input!r}: {outcome.what}"
        return RowError(outcome.code, what, outcome.why, outcome.fix or FIXES.get(outcome.code, ""))

    def _count(
        self, queries: pa.Table, answers: Answers, errors: Sequence[RowError | None]
    ) -> dict[str, Any]:
        plan, failed = self._plan, [error for error in errors if error is not None]
        sums: dict[str, float] = {}
        if plan.truth is not None:
            is_failed = np.array([error is not None for error in errors], bool)
            truth = plan.truth.read(queries[plan.columns.truth])
            sums = measure(answers, is_failed, truth, plan.cutoffs, plan.item_cutoffs)
        return {
            "rows": len(errors),
            "ok": len(errors) - len(failed),
            "errors": Counter(error.code for error in failed),
            "examples": [error.what for error in failed[:SHOWN_ERRORS]],
            "sids": len(answers.scores),
            "items": len(answers.item_sid),
            "sums": sums,
        }


def describe_search(plan: Plan, engine: Engine) -> dict[str, str]:
    """What the answers are answers of, for the metadata of files; nothing in it changes from run to run."""
    settings, running = plan.settings, engine.describe()
    margin = "" if settings.score_margin is None else f" within {settings.score_margin} nats"
    return {
        "version": __version__,
        "model": str(settings.model),
        "trie": "" if plan.trie is None else str(settings.trie),
        "trie_digest": "" if plan.trie is None else plan.trie.content_digest,
        "beams": format_beams(settings.beams) + margin,
        "score": str(settings.score),
        "levels": str(plan.levels),
        "device": running["device"],
        "dtype": running["dtype"],
        "kernels": json.dumps(running["kernels"], sort_keys=True),
    }
