"""From the numbers of a SID as they are given to its codes: level by level, each in its codebook."""

from typing import Any

import numpy as np

from grinf.config.settings import BuildTrieSettings
from grinf.errors import UsageError
from grinf.jobs.sid_columns import MAX_CODE, Fault
from grinf.trie.build import Layout

TOKEN_IDS_FORMAT = "token-ids"


class CodeRules:
    """What a catalogue's settings say about numbers.

    Args:
        settings: Codebook sizes, level offsets, token bases, END.
        packed: Codebook size and levels of packed SIDs, if they are packed.

    Attributes:
        codebook_sizes: Codes per level; None: as the rows will show.

    Raises:
        UsageError: Level offsets of unknown sizes.
        DataError: More codes than a model can have tokens for.
    """

    def __init__(self, settings: BuildTrieSettings, packed: tuple[int, int] | None) -> None:
        self._settings = settings
        self._depths = set[int]()
        self.codebook_sizes = settings.codebook_sizes or ((packed[0],) * packed[1] if packed else None)
        Layout(self.codebook_sizes or (), settings.end_token)
        if settings.offset_codes and self.codebook_sizes is None:
            why = "a level starts where the sizes before it end"
            raise UsageError("--offset-codes needs --codebook-sizes", why)

    def check(self, numbers: np.ndarray, fault: np.ndarray, *, are_token_ids: bool) -> np.ndarray:
        """Mark the rows whose numbers are out of place or out of range, and give the codes of the others.

        Args:
            numbers: int64 [n, levels], -1 past the end of a SID.
            fault: uint8 [n], `Fault` of each row; marked in place.
            are_token_ids: Whether they are token ids instead of codes.

        Raises:
            UsageError: Token ids without bases.
        """
        if are_token_ids:
            numbers = self._without_end(numbers)
        is_gap = (numbers[:, :-1] < 0) & (numbers[:, 1:] >= 0)
        fault[(fault == Fault.NONE) & is_gap.any(1)] = Fault.NULL_CODE
        starts, limits = self._ranges(are_token_ids=are_token_ids)
        if limits is None:
            return numbers
        depth = (numbers >= 0).sum(1)
        self._depths |= set(depth[fault == Fault.NONE].tolist())
        fault[(fault == Fault.NONE) & ~self._has_room(depth, len(limits))] = Fault.WRONG_DEPTH
        codes = numbers[:, : len(limits)]
        is_code, levels = codes >= 0, codes.shape[1]
        codes = codes - np.where(is_code, starts[:levels], 0)
        is_out = is_code & ((codes < 0) | (codes >= limits[:levels]))
        fault[(fault == Fault.NONE) & is_out.any(1)] = Fault.BAD_CODE
        return codes

    def refuse_levels(self) -> None:
        """Refuse settings for another number of levels than all SIDs have: it is not the rows.

        Raises:
            UsageError: Names the flag.
        """
        sizes, bases = self._settings.codebook_sizes, self._settings.token_base
        flag, numbers = ("--codebook-sizes", sizes) if sizes else ("--token-base", bases)
        if not numbers or not self._depths:
            return
        if not any(self._has_room(depth, len(numbers)) for depth in self._depths):
            given, have = ",".join(map(str, numbers)), ", ".join(map(str, sorted(self._depths)))
            what = f"{flag} {given} is for SIDs of {len(numbers)} codes, they have {have}"
            raise UsageError(what, fix="give one number per level")

    def _has_room(self, depth: Any, levels: int) -> Any:
        """Whether SIDs of a depth, or of each in an array, fit in a number of levels."""
        return depth == levels if self._settings.end_token is None else depth <= levels

    def _ranges(self, *, are_token_ids: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Number of code 0, and how many codes there can be, per level; None: any depth, any code."""
        sizes = None if self.codebook_sizes is None else np.array(self.codebook_sizes)
        if not are_token_ids:
            if sizes is None:
                return np.zeros(0, np.int64), None
            return (np.cumsum(sizes) - sizes if self._settings.offset_codes else np.zeros_like(sizes)), sizes
        if self._settings.token_base is None:
            why = "a code is its token id less the one of code 0 of its level"
            raise UsageError("token ids need --token-base", why, "add --token-base ID,ID,ID")
        bases = np.array(self._settings.token_base)
        if sizes is not None and len(sizes) == len(bases):
            return bases, sizes
        after = np.append(np.sort(bases), MAX_CODE)
        return bases, after[np.searchsorted(after, bases, "right")] - bases

    def _without_end(self, token_ids: np.ndarray) -> np.ndarray:
        """Drop the END of SIDs that have one."""
        end = self._settings.end_token
        if end is None or not end.isdecimal() or token_ids.shape[1] < 2:
            return token_ids
        last = np.maximum((token_ids >= 0).sum(1) - 1, 0)
        is_end = np.zeros(token_ids.shape, bool)
        is_end[np.arange(len(last)), last] = last > 0
        return np.where(is_end & (token_ids == int(end)), -1, token_ids)
