"""Text embeddings without a pretrained model: character n-grams by TF-IDF, folded into few dimensions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grinf.jobs.demo.catalogue import Catalogue

PARENT_WEIGHT = 0.4
"""How much of its parent a code takes over: titles such as "Stage 3" mean little alone."""


class TextEmbedder:
    """Maps texts to unit vectors; texts that share pieces of words are close.

    Args:
        texts: What the vocabulary, the weights and the directions are learned from.
        dim: Length of a vector.
        seed: Of the randomised decomposition.
    """

    def __init__(self, texts: Sequence[str], dim: int, seed: int) -> None:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        float32: Any = np.float32
        self._tfidf = TfidfVectorizer(
            analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, dtype=float32
        )
        self._fold = TruncatedSVD(dim, n_iter=4, random_state=seed)
        self._fold.fit(self._tfidf.fit_transform(texts))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts: float32 [n, dim]; a text without any known n-gram is the zero vector."""
        return unit(self._fold.transform(self._tfidf.transform(texts)))


def embed_items(embedder: TextEmbedder, catalogue: Catalogue) -> np.ndarray:
    """Embed every item by its title and its parent's: float32 [items, dim], unit length."""
    titles = embedder([item.title for item in catalogue.items])
    vectors = titles.copy()
    for position, item in enumerate(catalogue.items):
        if item.parent is not None:
            vectors[position] += PARENT_WEIGHT * titles[item.parent]
    return unit(vectors)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; zero rows stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
