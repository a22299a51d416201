"""Make what the demo needs from nothing but the tabular list: items, SIDs, tokenizer, trained retriever."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from grinf.jobs.demo.baselines import measure_baselines
from grinf.jobs.demo.catalogue import Catalogue, read_catalogue
from grinf.jobs.demo.embed import embed_items, learn_embedding
from grinf.jobs.demo.files import DemoFiles, write_table
from grinf.jobs.demo.queries import Query, split_queries
from grinf.jobs.demo.report import SystemScore
from grinf.jobs.demo.stages import Stages
from grinf.jobs.demo.tokenizer import save_tokenizer, train_tokenizer
from grinf.jobs.demo.train import build_model, save_model, train
from grinf.jobs.residual_kmeans import residual_kmeans

LEVELS, CODEBOOK_SIZE = 3, 256
DIM = 128
"""Length of an embedding, and hidden size of the model, which starts from the embeddings."""
MAX_PIECES = 8192


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the two sizes of the demo do differently.

    Attributes:
        chapters: Numbers of the list's chapters; None: all.
        steps: Of training.
        max_test: Queries to hold out.
        max_compared: Test queries that every beam schedule is measured on.
    """

    chapters: frozenset[int] | None
    steps: int
    max_test: int = 2000
    max_compared: int = 300


CHAPTER = DemoPlan(frozenset({11}), steps=300)
"""Diseases of the digestive system."""
FULL = DemoPlan(None, steps=2300)


@dataclass(frozen=True, slots=True)
class Made:
    """What was made and written, and how the baselines do on it; `loss` is the last, nats per SID token."""

    catalogue: Catalogue
    train: Sequence[Query]
    test: Sequence[Query]
    baselines: Sequence[SystemScore]
    num_parameters: int
    loss: float


def make(plan: DemoPlan, tabular_list: Path, files: DemoFiles, seed: int, stages: Stages) -> Made:
    """Run the chain, and write items, queries and the model.

    Raises:
        EnvironmentFault: The list is damaged.
    """
    with stages("read the catalogue"):
        catalogue = read_catalogue(tabular_list, plan.chapters)
        known, test = split_queries(catalogue, plan.max_test, seed)
    with stages("embed titles"):
        embed = learn_embedding([item.title for item in catalogue.items], DIM, seed)
        vectors = embed_items(embed, catalogue)
    with stages("make SIDs"):
        quantization = residual_kmeans(vectors, LEVELS, CODEBOOK_SIZE, seed, unique=True)
    write_items(files, catalogue, quantization.codes)
    write_queries(files, catalogue, test)
    with stages("measure baselines"):
        queries = embed([query.text for query in test])
        baselines = measure_baselines(catalogue, known, test, vectors, queries)
    with stages("train the tokenizer"):
        sids = quantization.codes.tolist()
        titles = [(item.title, sid) for item, sid in zip(catalogue.items, sids, strict=True)]
        pairs = [(query.text, sids[target]) for query in known for target in query.targets]
        texts = [text for text, _ in (*titles, *pairs)]
        tokenizer = train_tokenizer(texts, MAX_PIECES, LEVELS, CODEBOOK_SIZE)
    with stages("train the retriever", plan.steps) as advance:
        model = build_model(tokenizer, quantization.codebooks, embed, seed)
        loss = train(model, tokenizer, titles, pairs, plan.steps, seed, advance)
    save_tokenizer(tokenizer, files.model)
    save_model(model, files.model)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return Made(catalogue, known, test, baselines, num_parameters, loss)


def write_items(files: DemoFiles, catalogue: Catalogue, codes: np.ndarray) -> None:
    """Write the catalogue as `grinf build-trie` reads it."""
    columns = {
        "item_id": [item.code for item in catalogue.items],
        "title": [item.title for item in catalogue.items],
        "parent_title": [catalogue.parent_title(item) for item in catalogue.items],
        "sid": pa.array(codes.tolist(), pa.list_(pa.int32())),
    }
    write_table(files.items, columns)


def write_queries(files: DemoFiles, catalogue: Catalogue, test: Sequence[Query]) -> None:
    """Write the held-out queries as `grinf recall` reads them."""
    columns = {
        "query_id": list(range(len(test))),
        "prompt": [query.text for query in test],
        "truth": [[catalogue.items[target].code for target in query.targets] for query in test],
    }
    write_table(files.queries, columns)
