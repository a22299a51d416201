"""Text embeddings without a pretrained model: character n-grams by TF-IDF, folded into few dimensions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grinf.jobs.demo.catalogue import Catalogue

PARENT_WEIGHT = 0.4
"""How much of its parent a code takes over: titles such as "Stage 3" mean little alone."""

Embed = Callable[[Sequence[str]], np.ndarray]
"""Embeds texts: float32 [n, dim], unit length; a text without any known n-gram is the zero vector."""


def learn_embedding(texts: Sequence[str], dim: int, seed: int) -> Embed:
    """Learn vocabulary, weights and directions from texts; texts that share pieces of words are close."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    float32: Any = np.float32
    tfidf = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, dtype=float32)
    return (
        make_pipeline(tfidf, TruncatedSVD(dim, n_iter=4, random_state=seed), Normalizer())
        .fit(texts)
        .transform
    )


def embed_items(embed: Embed, catalogue: Catalogue) -> np.ndarray:
    """Embed every item by its title and its parent's: float32 [items, dim], unit length."""
    from sklearn.preprocessing import Normalizer

    titles = embed([item.title for item in catalogue.items])
    vectors = titles.copy()
    for position, item in enumerate(catalogue.items):
        if item.parent is not None:
            vectors[position] += PARENT_WEIGHT * titles[item.parent]
    normalizer: Any = Normalizer()
    return normalizer.transform(vectors)
