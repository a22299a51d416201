"""What a selection scores against: the columns of the lm_head, and the catalogue on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grinf.errors import TrieFileError, UsageError
from grinf.ops.contracts import TrieView
from grinf.trie import Trie

SCORES = ("vocab", "level", "children", "topk")
FREE_SCORES = ("vocab", "topk")


@dataclass(frozen=True, slots=True)
class Columns:
    """The logits that a selection computes.

    Attributes:
        head: [C, hidden], the lm_head rows of these columns.
        column: int32 [levels, codes + 1], column of (level, code); None where the column is the code.
    """

    head: Tensor
    column: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceTrie:
    """The catalogue's arrays where the kernels read them; see `grinf.ops.contracts.TrieView`.

    Attributes:
        leaf_offset: Node number of leaf 0.
        live: int32 [1 + views + slots, words] bit masks of the nodes that may be found: row 0 for requests
            without a filter, a row per view, a row per beam slot for filters of single requests. None: all
            nodes.
    """

    first_child: Tensor
    code: Tensor
    token: Tensor
    end_code: Tensor
    leaf_offset: int
    live: Tensor | None = None


class Scoring:
    """Score mode, lm_head columns and catalogue of an engine.

    Full-vocabulary scores need every column at every level, so requests at different levels share a batch.
    The other scores of a constrained search need the level's columns alone.

    Attributes:
        first_codes: int64 [codes], token ids of the codes of level 0; None: nobody asks for their mass.
    """

    def __init__(
        self,
        score: str,
        head: Tensor,
        trie: Trie | None,
        workspace_bytes: int,
        filter_slots: int = 0,
        *,
        sid_mass: bool = False,
    ) -> None:
        check_score(score, constrained=trie is not None)
        self.score, self._workspace_bytes = score, workspace_bytes
        self._full = Columns(head, None)
        self._by_level: tuple[Columns, ...] = ()
        self._views: dict[str, int] = {}
        self.first_codes: Tensor | None = None
        self.trie: DeviceTrie | None = None
        if trie is not None:
            self.trie = upload_trie(trie, head.device, filter_slots)
            self._views = {name: row for row, name in enumerate(trie.views, start=1)}
            self._full = Columns(head, self.trie.token)
            if score == "vocab" and sid_mass:
                self.first_codes = _first_codes(trie, head.device)
            if score != "vocab":
                self._by_level = tuple(_level_columns(head, trie, level) for level in range(trie.levels))

    @property
    def mixed_levels(self) -> bool:
        """Whether one batch may hold requests at different levels."""
        return not self._by_level

    def view_row(self, view: str | None) -> int:
        """Row of the live masks of a view; of all nodes if None."""
        return 0 if view is None else self._views[view]

    def filter_row(self, slot: int) -> int:
        """Row of the live masks that belongs to a beam slot."""
        return 1 + len(self._views) + slot

    def set_filter(self, slot: int, mask: np.ndarray) -> None:
        """Store the mask of the request that holds a beam slot: uint32 words, one bit per node."""
        assert self.trie is not None
        assert self.trie.live is not None
        self.trie.live[self.filter_row(slot)].copy_(torch.from_numpy(mask.view(np.int32)))

    def columns(self, level: int | None) -> Columns:
        """Columns of a batch whose selection chooses `level`; None where levels mix."""
        if self.mixed_levels:
            return self._full
        assert level is not None
        return self._by_level[level]

    def requests_per_chunk(self, width: int, columns: Columns) -> int:
        """Requests of `width` beams whose logits fit into the workspace; at least one."""
        head = columns.head
        return max(1, self._workspace_bytes // (width * head.shape[0] * head.element_size()))

    def trie_view(self, columns: Columns, view: Tensor, capacity: int) -> TrieView | None:
        """The catalogue as a batch sees it; None for a free search."""
        trie = self.trie
        if trie is None:
            return None
        shown = None if trie.live is None else view
        return TrieView(
            trie.first_child, trie.code, columns.column, trie.token, trie.end_code, trie.live, shown, capacity
        )


def check_score(score: str, *, constrained: bool) -> None:
    """Refuse a score mode that does not exist, or that needs a trie where there is none.

    Raises:
        UsageError: Says which modes there are.
    """
    allowed = SCORES if constrained else FREE_SCORES
    if score not in allowed:
        reason = (
            "" if score not in SCORES else f"{score} normalises over the trie's codes, and there is no trie"
        )
        raise UsageError(
            f"--score {score} is not possible here", reason, f"choose among {', '.join(allowed)}"
        )


def check_trie(trie: Trie, vocab_rows: int) -> None:
    """Refuse a catalogue that the model cannot spell.

    Raises:
        TrieFileError: The trie has no token mapping, or names a token id that the lm_head lacks.
    """
    if trie.token_ids is None:
        raise TrieFileError(
            "the trie does not say which tokens its codes are",
            "it was built without --tokenizer and without --token-base",
            "build it again with --tokenizer DIR --token-template T, or with --token-base A,B,C",
        )
    highest = max(int(table.max(initial=-1)) for table in trie.token_ids)
    if highest >= vocab_rows:
        raise TrieFileError(
            f"the trie uses token id {highest}, the model's lm_head has {vocab_rows} rows",
            "trie and model do not belong together",
            "build the trie with this model's tokenizer",
        )


def upload_trie(trie: Trie, device: torch.device, filter_slots: int) -> DeviceTrie:
    """Copy a trie's arrays to the device, with room for the filters of `filter_slots` requests.

    Raises:
        CapacityError: The catalogue has more nodes than 32-bit node numbers.
    """
    first_child, nodes = trie.first_child().astype(np.int32), trie.level_offset[-1]
    assert trie.token_ids is not None
    widest = max(len(table) for table in trie.token_ids)
    token = np.zeros((trie.levels, widest + 1), np.int32)
    for row, table in zip(token, trie.token_ids, strict=True):
        row[: len(table)] = np.maximum(table, 0)
    end_code = np.array([-1 if code is None else code for code in trie.end_codes], np.int32)
    codes = np.ascontiguousarray(trie.node_codes())
    signed = codes.view(np.int16) if codes.dtype == np.uint16 else codes.astype(np.int32)
    has_masks = bool(trie.views) or trie.deleted is not None or filter_slots > 0
    return DeviceTrie(
        first_child=torch.from_numpy(first_child).to(device),
        code=torch.from_numpy(signed).to(device),
        token=torch.from_numpy(token).to(device),
        end_code=torch.from_numpy(end_code).to(device),
        leaf_offset=trie.leaf_offset,
        live=_live_masks(trie, nodes, filter_slots).to(device) if has_masks else None,
    )


def _live_masks(trie: Trie, nodes: int, filter_slots: int) -> Tensor:
    masks = torch.full((1 + len(trie.views) + filter_slots, -(-nodes // 32)), -1, dtype=torch.int32)
    if trie.deleted is not None:
        masks[0] = torch.from_numpy(trie.live_mask().view(np.int32))
    for row, name in enumerate(trie.views, start=1):
        masks[row] = torch.from_numpy(trie.live_mask(name).view(np.int32))
    return masks


def _first_codes(trie: Trie, device: torch.device) -> Tensor:
    """Token ids of the codes of level 0; END, which no SID begins with, is none of them."""
    assert trie.token_ids is not None
    table = trie.token_ids[0][: trie.codebook_sizes[0]]
    return torch.from_numpy(table[table >= 0].astype(np.int64)).to(device)


def _level_columns(head: Tensor, trie: Trie, level: int) -> Columns:
    """The lm_head rows of one level's codes, in code order; a view where their token ids are contiguous."""
    assert trie.token_ids is not None
    table = trie.token_ids[level]
    codes = np.flatnonzero(table >= 0)
    tokens = table[codes]
    first = int(tokens[0])
    if np.array_equal(tokens, np.arange(first, first + len(tokens))):
        rows = head[first : first + len(tokens)]
    else:
        rows = head[torch.from_numpy(tokens.astype(np.int64)).to(head.device)]
    if len(codes) == len(table):
        return Columns(rows, None)
    column = np.zeros((trie.levels, len(table) + 1), np.int32)
    column[level, codes] = np.arange(len(codes))
    return Columns(rows, torch.from_numpy(column).to(head.device))
