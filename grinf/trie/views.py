"""Filters: which nodes of the trie lead to an item that may be returned.

Filters are combined on items and only then carried up. Combining them on inner nodes would be wrong: two
filters may share a prefix, or even a SID, and no item.
"""

from collections.abc import Sequence

import numpy as np


def live_leaves(live_items: np.ndarray, item_ptr: np.ndarray | None) -> np.ndarray:
    """Leaves with at least one live item, bool [leaves].

    Args:
        live_items: bool [item rows].
        item_ptr: Rows of each leaf; None: one item each.
    """
    return live_items if item_ptr is None else _any_below(live_items, item_ptr)


def live_nodes(live_leaves: np.ndarray, child_ptr: Sequence[np.ndarray]) -> np.ndarray:
    """Nodes with a live leaf below, bool [nodes], the root first, then level by level."""
    levels = [np.asarray(live_leaves, bool)]
    for ptr in reversed(child_ptr):
        levels.append(_any_below(levels[-1], ptr))
    root = levels[-1].any(keepdims=True)
    return np.concatenate([root, *reversed(levels)])


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """Pack bool [n] into uint32 words, bit i % 32 of word i // 32."""
    packed = np.packbits(bits, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view("<u4")


def bits_at(index: np.ndarray, num_words: int) -> np.ndarray:
    """Words with the bits of ascending int64 indices set, uint32 [num_words]; costs as they are many."""
    words = np.zeros(num_words, np.uint32)
    if len(index):
        word = index >> 5
        first = np.flatnonzero(np.append(True, word[1:] != word[:-1]))
        bit = np.left_shift(np.uint32(1), (index & 31).astype(np.uint32))
        words[word[first]] = np.bitwise_or.reduceat(bit, first)
    return words


def _any_below(live: np.ndarray, ptr: np.ndarray) -> np.ndarray:
    # No node is childless, so that no segment of reduceat is empty.
    return np.logical_or.reduceat(live, ptr[:-1].astype(np.int64))
