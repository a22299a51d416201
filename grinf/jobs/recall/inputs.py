"""The query files: which they are, what they hold, and how to read a unit of them in bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from grinf.errors import DataError
from grinf.jobs.arrow_types import is_list, plain_type
from grinf.jobs.parquet_files import columns_of, find_files, open_parquet, source_of
from grinf.jobs.recall.units import Unit

BATCH_ROWS = 2048
"""Rows that are decoded at a time, or those of a unit where they are fewer."""


@dataclass(frozen=True, slots=True)
class QueryFile:
    """A parquet file of queries.

    Attributes:
        digest: Of its bytes.
        state: What changes when its bytes do: size, time and number of the file.
        row_groups: Rows of each row group.
        columns: Names of the columns.
    """

    path: Path
    digest: str
    state: tuple[int, int, int]
    row_groups: tuple[int, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Queries:
    """All query files, in order, and the columns that they have together."""

    files: tuple[QueryFile, ...]
    schema: pa.Schema


def open_queries(patterns: Sequence[Path]) -> Queries:
    """Find the query files and read their footers.

    Args:
        patterns: Files, folders and patterns, as `find_files` takes them.

    Raises:
        UsageError: A pattern without a file.
        DataError: No parquet file, files whose columns contradict each other, or no row in any of them.
    """
    paths = find_files(patterns)
    schemas, files = zip(*map(_describe, paths), strict=True)
    if not any(sum(file.row_groups) for file in files):
        raise DataError(f"there are no queries in {', '.join(map(str, paths[:3]))}", "every file has 0 rows")
    return Queries(files, _merge(paths, schemas))


def _describe(path: Path) -> tuple[pa.Schema, QueryFile]:
    with open_parquet(path) as file:
        names, schema, metadata = columns_of(path, file), file.schema_arrow, file.metadata
        row_groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    plain = pa.schema([field.with_type(_plain(field.type)) for field in schema])
    state, digest = _state(path), source_of(path).digest
    return plain, QueryFile(path.resolve(), digest, state, row_groups, tuple(names))


def _plain(kind: pa.DataType) -> pa.DataType:
    """The plain type, also of the values of lists; but Arrow cannot cast views of lists."""
    if not is_list(kind):
        return plain_type(kind)
    value, is_view = _plain(kind.value_type), pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return kind if is_view or value == kind.value_type else pa.list_(kind.value_field.with_type(value))


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _merge(paths: Sequence[Path], schemas: Sequence[pa.Schema]) -> pa.Schema:
    merged = schemas[0]
    for path, schema in zip(paths, schemas, strict=True):
        try:
            merged = pa.unify_schemas([merged, schema], promote_options="permissive")
        except pa.ArrowException as error:
            what = f"the columns of {path} do not fit those of {paths[0]}"
            raise DataError(what, str(error).strip()) from error
    return merged.remove_metadata()


class UnitReader:
    """Reads units; one that comes after the one before costs no second look at its row group.

    Args:
        queries: The files.
        columns: Columns to read; one that a file lacks is null there.
    """

    def __init__(self, queries: Queries, columns: Sequence[str]) -> None:
        self._files = queries.files
        self._states = [file.state for file in queries.files]
        self._schema = pa.schema([queries.schema.field(name) for name in columns])
        self._position = (-1, -1, -1)  # File, row group, and row within it.
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: list[pa.RecordBatch] = []

    def read(self, unit: Unit) -> pa.Table:
        """Read the rows of a unit.

        Raises:
            DataError: Damaged data, values that do not fit the type that the files have in common, or a file
                that was changed since the job was planned.
        """
        path = self._files[unit.file].path
        try:
            *place, row = self._position
            if place != [unit.file, unit.row_group] or row > unit.start:
                self._batches, self._rest, row = self._open(unit), [], 0
            for skipped in range(row, unit.start, BATCH_ROWS):
                self._take(min(BATCH_ROWS, unit.start - skipped))
            batches = self._take(unit.num_rows)
            self._refuse_changed(unit.file)
            self._position = (unit.file, unit.row_group, unit.start + unit.num_rows)
            return self._fit(pa.Table.from_batches(batches))
        except (OSError, pa.ArrowException) as error:
            what = f"{path} cannot be read at row {unit.start:,} of row group {unit.row_group}"
            raise DataError(what, str(error).strip().splitlines()[0], "write the file again") from error

    def _refuse_changed(self, number: int) -> None:
        """Look at a file's size and times, and at its content where these have changed."""
        source = self._files[number]
        if (state := _state(source.path)) == self._states[number]:
            return
        if source_of(source.path).digest != source.digest:
            fix = "start again with --overwrite: answers from both would be mixed"
            raise DataError(f"{source.path} was changed while the job ran", fix=fix)
        self._states[number] = state

    def _open(self, unit: Unit) -> Iterator[pa.RecordBatch]:
        file = open_parquet(self._files[unit.file].path)
        self._refuse_changed(unit.file)
        names = [name for name in self._schema.names if name in file.schema_arrow.names]
        return file.iter_batches(min(BATCH_ROWS, unit.num_rows), [unit.row_group], names)

    def _take(self, num_rows: int) -> list[pa.RecordBatch]:
        """Cut rows off the stream of batches, which may be smaller than they were asked to be."""
        taken: list[pa.RecordBatch] = []
        while num_rows:
            batch = self._rest.pop() if self._rest else next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid("the file is shorter than its footer says")
            if batch.num_rows > num_rows:
                self._rest.append(batch.slice(num_rows))
                batch = batch.slice(0, num_rows)
            num_rows -= batch.num_rows
            taken.append(batch)
        return taken

    def _fit(self, table: pa.Table) -> pa.Table:
        def column(name: str) -> pa.ChunkedArray | pa.Array:
            return table[name] if name in table.column_names else pa.nulls(len(table))

        names = self._schema.names
        return pa.table([column(name) for name in names], names=names).cast(self._schema)
