"""`grinf make-sids` without a terminal: parquet with a vector per item in, the same items with SIDs out."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from grinf.config.settings import MakeSidsSettings
from grinf.errors import DataError, UsageError
from grinf.jobs import outputs
from grinf.jobs.arrow_types import is_list
from grinf.jobs.extras import require
from grinf.jobs.item_columns import ITEM_NAMES, find_column
from grinf.jobs.item_rows import read_ids
from grinf.jobs.parquet_files import columns_of, find_files, mark_of, open_parquet, refuse_bad_text, source_of
from grinf.jobs.residual_kmeans import SidQuality, measure_sids, residual_kmeans
from grinf.jobs.sid_columns import MAX_LEVELS, Fault
from grinf.trie.publish import replacing

OnProgress = Callable[[str, int, int | None], None]

EMBEDDING_NAMES = ("embedding", "embeddings", "vector", "emb", "features")
MADE_FROM = b"grinf.make_sids"
"""Key of the output's metadata that says which inputs and settings made it."""


@dataclass(frozen=True, slots=True)
class MakeSidsReport:
    """What was done.

    Attributes:
        status: `made`; `unchanged`: the output is of the same inputs and settings; `planned`: a dry run.
        num_items, dim: Vectors and their length; 0 where they were not read.
        quality: Of the SIDs that were made now.
        seconds: Wall time.
    """

    status: Literal["made", "unchanged", "planned"]
    output: Path
    item_column: str
    embedding_column: str
    num_items: int = 0
    dim: int = 0
    quality: SidQuality | None = None
    seconds: float = 0.0


def run_make_sids(settings: MakeSidsSettings, on_progress: OnProgress) -> MakeSidsReport:
    """Cluster the vectors of a catalogue and write `sid` in their place; other columns are kept.

    Raises:
        EnvironmentFault: scikit-learn is not installed.
        UsageError: Levels, inputs or columns that do not fit, or an output that exists and is something else.
        DataError: An item id that is null or comes twice, a vector that is null, of another length or not
            finite, or SIDs that cannot be unique.
        StorageError: The output cannot be written.
    """
    started = time.perf_counter()
    require("sids", "sklearn")
    if settings.levels > MAX_LEVELS:
        raise UsageError(f"--levels {settings.levels} is too many", f"SIDs have up to {MAX_LEVELS} codes")
    files = find_files(settings.embeddings)
    with open_parquet(files[0]) as first:
        names = columns_of(files[0], first)
    item = find_column(files[0], names, "--item-column", settings.item_column, ITEM_NAMES, "item ids")
    embedding = find_column(
        files[0], names, "--embedding-column", settings.embedding_column, EMBEDDING_NAMES, "embeddings"
    )
    output = outputs.place(settings.output or Path(f"{settings.embeddings[0].stem}.sids.parquet"))
    outputs.refuse_inputs([output], files, settings.embeddings)
    made_from = _made_from(settings, files)
    found = outputs.existing(output, lambda path: mark_of(path, MADE_FROM), "grinf make-sids")
    if found == made_from:
        return MakeSidsReport("unchanged", output, item, embedding)
    if found is not None and not settings.overwrite:
        raise outputs.exists(output)
    table, vectors = _read(files, item, embedding)
    num_items, dim = vectors.shape
    if settings.dry_run:
        return MakeSidsReport("planned", output, item, embedding, num_items, dim)
    sids = residual_kmeans(
        vectors,
        settings.levels,
        settings.codebook_size,
        settings.seed,
        balanced=settings.balanced,
        unique=settings.unique,
        on_level=lambda done: on_progress("cluster", done, settings.levels),
    ).codes
    table = table.append_column("sid", pa.array(list(sids), pa.list_(pa.int32())))
    with outputs.writing(output), replacing(output) as temporary:
        pq.write_table(table.replace_schema_metadata({MADE_FROM: made_from}), temporary, compression="zstd")
    seconds = time.perf_counter() - started
    return MakeSidsReport("made", output, item, embedding, num_items, dim, measure_sids(sids), seconds)


def _made_from(settings: MakeSidsSettings, files: Sequence[Path]) -> bytes:
    """What decides the SIDs, as JSON."""
    apart = {"embeddings", "output", "overwrite", "dry_run"}
    content = {key: value for key, value in settings.spelled().items() if key not in apart}
    return json.dumps({"settings": content, "inputs": [source_of(path).digest for path in files]}).encode()


def _read(files: Sequence[Path], item: str, embedding: str) -> tuple[pa.Table, np.ndarray]:
    """Read all columns but the vectors, and the vectors as float32 [n, dim]."""
    tables: list[pa.Table] = []
    vectors: list[np.ndarray] = []
    for path in files:
        with open_parquet(path) as file:
            names = columns_of(path, file)
            find_column(path, names, "--item-column", item)
            find_column(path, names, "--embedding-column", embedding)
            table = file.read()
        refuse_bad_text(path, table[item])
        is_null = read_ids(table[item], item).is_null().to_numpy(zero_copy_only=False)
        _refuse_rows(path, table[item], is_null, Fault.NULL_ITEM.reason, "item id")
        vectors.append(_vectors(path, table[embedding], vectors[0].shape[1] if vectors else None))
        tables.append(table.drop_columns([name for name in (embedding, "sid") if name in names]))
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise UsageError("the files have different columns", str(error).splitlines()[0]) from error
    ids, rows = read_ids(table[item], item).value_counts().flatten()
    most = int(np.argmax(rows))
    if rows[most].as_py() > 1:
        what = f"item id {ids[most].as_py()!r} is in {rows[most]} rows"
        raise DataError(what, "an item has one SID", "leave one row of each item")
    return table, np.concatenate(vectors)


def _vectors(path: Path, column: pa.ChunkedArray, dim: int | None) -> np.ndarray:
    """Read a column of vectors; `dim` is the length of those before, if there are any."""
    kind = column.type
    number = kind.value_type if is_list(kind) else pa.null()
    if not pa.types.is_floating(number) and not pa.types.is_integer(number):
        raise UsageError(
            f"{path}: the embedding column is of type {kind}", fix="vectors are lists of numbers"
        )
    if len(column) == 0:
        raise DataError(f"{path} has no rows", fix="leave the file out")
    compute: Any = pyarrow.compute
    lengths = compute.fill_null(compute.list_value_length(column), -1).to_numpy()
    _refuse_rows(path, column, lengths < 0, "it is null")
    dim = dim or max(1, int(lengths[0]))
    _refuse_rows(path, column, lengths != dim, f"every vector needs {dim} numbers, as the first has")
    flat = compute.list_flatten(column)
    vectors = compute.fill_null(flat.cast(pa.float32(), safe=False), np.nan).to_numpy().reshape(-1, dim)
    is_number = compute.fill_null(compute.is_finite(flat), False).to_numpy().reshape(-1, dim)
    _refuse_rows(path, column, ~is_number.all(axis=1), "it has a null, NaN or infinite number")
    _refuse_rows(path, column, ~np.isfinite(vectors).all(axis=1), "it has a number that overflows float32")
    return vectors


def _refuse_rows(
    path: Path, column: pa.ChunkedArray, is_bad: np.ndarray, why: str, name: str = "vector"
) -> None:
    if is_bad.any():
        row = int(is_bad.argmax())
        what = f"{path} row {row}: the {name} {str(column[row].as_py())[:80]} cannot be used"
        raise DataError(what, why, f"correct or remove it ({int(is_bad.sum()):,} rows are like this)")
