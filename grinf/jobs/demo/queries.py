"""The demo's queries: the catalogue's notes as search texts, and a split that leaks nothing."""

import random
import re
from dataclasses import dataclass

from grinf.jobs.demo.catalogue import Catalogue

MIN_LETTERS = 3
MAX_TEST_TARGETS = 3
"""A text that names more items than this is too vague to judge a retriever by."""


@dataclass(frozen=True, slots=True)
class Query:
    """A search text and the positions of the items that it means, ascending."""

    text: str
    targets: tuple[int, ...]


def normalise(text: str) -> str:
    """Lower-case words and numbers, one space apart: two texts are the same query if this is equal."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def make_queries(catalogue: Catalogue) -> list[Query]:
    """Merge notes of the same text into one query each, in the order of their first appearance."""
    merged: dict[str, tuple[str, set[int]]] = {}
    for note in catalogue.notes:
        key = normalise(note.text)
        if len(key) >= MIN_LETTERS:
            merged.setdefault(key, (note.text, set()))[1].add(note.item)
    return [Query(text, tuple(sorted(targets))) for text, targets in merged.values()]


def split_queries(catalogue: Catalogue, max_test: int, seed: int) -> tuple[list[Query], list[Query]]:
    """Split the catalogue's queries into those to train on and those to be judged by.

    Test queries are a fifth at most, in random order. None has the text of a training query, or of a title:
    titles are trained on as well.
    """
    titles = {normalise(item.title) for item in catalogue.items}
    queries = make_queries(catalogue)
    fit = [q for q in queries if len(q.targets) <= MAX_TEST_TARGETS and normalise(q.text) not in titles]
    random.Random(seed).shuffle(fit)
    test = fit[: min(max_test, len(fit) // 5)]
    held_out = set(test)
    return [query for query in queries if query not in held_out], test
