"""Histories: items or SIDs that a user has met, put into the prompt as the tokens of their SIDs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from grinf.errors import RowError, UsageError
from grinf.jobs.recall.columns import values
from grinf.jobs.recall.sid_lookup import Named, SidLookup
from grinf.jobs.recall.tokenizer import Prompt, PromptTokenizer, Template

if TYPE_CHECKING:
    from grinf.trie import Trie


class HistoryPrompter:
    """Prompts from histories.

    Args:
        lookup: Finds the SIDs.
        trie: Knows the tokens of their codes.
        tokenizer: Of the checkpoint; None: it has none, and there is no text.
        template: Text around and between the SIDs.
        suffix: Tokens to append.

    Raises:
        UsageError: Text without a tokenizer, or codes without tokens.
    """

    def __init__(
        self,
        lookup: SidLookup,
        trie: "Trie",
        tokenizer: PromptTokenizer | None,
        template: Template,
        suffix: Sequence[str],
    ) -> None:
        if trie.token_ids is None:
            raise UsageError("a history needs token ids", "the trie has none", "build it with --tokenizer")
        if tokenizer is None and (suffix or template != Template()):
            raise UsageError(
                "--template and --suffix need a tokenizer", "the model has none", "leave them out"
            )
        self._lookup, self._has_short = lookup, trie.end_codes[-1] is not None
        self._token_ids = [ids[:size] for ids, size in zip(trie.token_ids, trie.codebook_sizes, strict=True)]
        self._before: list[int] = []
        self._separator: list[int] = []
        self._after: list[int] = []
        if tokenizer is not None:
            (self._before,) = tokenizer.encode([template.before], begin=True)
            self._separator, after = tokenizer.encode([template.separator, template.after])
            self._after = after + tokenizer.suffix_ids(suffix)

    def __call__(self, column: pa.ChunkedArray) -> list[Prompt]:
        """Make the prompts of a unit."""
        named = self._lookup.read(column)
        ends = np.searchsorted(named.row, np.arange(len(column) + 1))
        tokens, is_known = self._tokens(named.sids)
        prompts: list[Prompt] = []
        for row, value in enumerate(values(column)):
            span = slice(int(ends[row]), int(ends[row + 1]))
            fault = _fault(value, named, span, is_known)
            prompts.append(fault or self._prompt(tokens[span]))
        return prompts

    def _prompt(self, sids: np.ndarray) -> np.ndarray:
        parts = [self._before]
        for index, sid in enumerate(sids):
            parts += [self._separator, sid[sid >= 0]] if index else [sid[sid >= 0]]
        return np.concatenate([*parts, self._after]).astype(np.int64)

    def _tokens(self, sids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [n, levels], -1 past a short SID; and whether every code has one."""
        tokens = np.full(sids.shape, -1, np.int64)
        is_known = np.all(sids[:, : 1 if self._has_short else None] >= 0, axis=1)
        for level, ids in enumerate(self._token_ids):
            fits = (sids[:, level] >= 0) & (sids[:, level] < len(ids))
            tokens[fits, level] = ids[sids[fits, level]]
            is_known &= (sids[:, level] < 0) | (tokens[:, level] >= 0)
        return tokens, is_known


def _fault(value: Any, named: Named, span: slice, is_known: np.ndarray) -> RowError | None:
    if value is None or isinstance(value, RowError):
        return value or RowError("null_input", "the input is null")
    if len(value) != span.stop - span.start:
        return RowError("bad_type", "the history has a null in it")
    if is_known[span].all():
        return None
    first = span.start + int(np.argmin(is_known[span]))
    return RowError("unknown_item", f"{named.given[first].as_py()!r} of the history is not in the catalogue")
