"""Everything about a recall job that is known, and can be refused, before weights are read."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from grinf import __version__
from grinf.backend.interface import EngineOptions
from grinf.config.settings import RecallSettings
from grinf.errors import UsageError
from grinf.jobs.extras import require
from grinf.jobs.outputs import place, refuse_inputs
from grinf.jobs.recall.answers import output_schema
from grinf.jobs.recall.columns import Columns, pick_columns
from grinf.jobs.recall.filters import Filters
from grinf.jobs.recall.inputs import Queries, open_queries
from grinf.jobs.recall.metrics import CUTOFFS
from grinf.jobs.recall.output import Output
from grinf.jobs.recall.prompts import Prompter, make_prompter
from grinf.jobs.recall.sid_lookup import SidLookup
from grinf.jobs.recall.units import Unit, plan_units
from grinf.model.config import read_config, read_generation
from grinf.runtime.beam_width import make_policy
from grinf.trie import Trie
from grinf.trie.tokens import check_tokenizer

NOT_CONTENT = {
    *("input", "output", "model", "trie", "executor", "resume", "overwrite", "dry_run"),
    *("on_error", "allow_rejects", "abort_rejects"),
    *("device", "memory_fraction", "workspace_bytes", "graphs"),
}
"""Settings that do not bear on the answers, or do so by a file's content, which is compared instead."""

MODEL_FILES = {".json", ".safetensors", ".jinja", ".txt", ".model"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A job that can start.

    Attributes:
        units: Units of work.
        options, trie: Of the engine.
        knows_tokens: Whether the trie's token ids are those of the model's tokenizer; False: it has none.
        filters: What each query may see; None: everything.
        levels: Tokens per SID.
        requested: SIDs that a query asks for. most_sids: those that it can get.
        cutoffs, item_cutoffs: Each K that answers are judged by, as SIDs and as items.
        schema: Of the output.
    """

    settings: RecallSettings
    queries: Queries
    columns: Columns
    units: list[Unit]
    options: EngineOptions
    trie: Trie | None
    knows_tokens: bool
    filters: Filters | None
    levels: int
    prompter: Prompter
    truth: SidLookup | None
    requested: int
    most_sids: int
    cutoffs: list[int]
    item_cutoffs: list[int]
    schema: pa.Schema
    output: Output

    @property
    def num_rows(self) -> int:
        """Queries of the input."""
        return sum(unit.num_rows for unit in self.units)

    @property
    def warnings(self) -> list[str]:
        """What a reader should know."""
        warnings: list[str] = []
        top_k, width = self.settings.top_k, self.options.beams[-1]
        if top_k is not None and top_k > width:
            warnings.append(f"--top-k {top_k} is more than the {width} beams that the search keeps")
        left_out = [str(k) for k in CUTOFFS if k not in self.cutoffs]
        if self.truth is not None and left_out:
            why = f"a query gets {self.most_sids:,} SIDs at most"
            warnings.append(f"metrics of SIDs at K = {', '.join(left_out)} are left out: {why}")
        if not self.knows_tokens:
            warnings.append("the model has no tokenizer to compare the token ids of the trie with")
        if self.settings.model is not None and (asked := read_generation(self.settings.model)):
            spelled = ", ".join(f"{key} = {value}" for key, value in asked.items())
            warnings.append(f"generation_config.json asks for {spelled}: recall takes no notice")
        return warnings


def make_plan(settings: RecallSettings) -> Plan:
    """Check inputs, columns, catalogue, tokenizer and output path.

    Raises:
        UsageError: Settings that cannot be used, alone or together.
        DataError: Inputs that cannot be read.
        ModelError, TrieFileError: A model, tokenizer or catalogue that cannot be used.
    """
    assert settings.model is not None, "RecallSettings refuses to be without a model"
    if settings.executor == "ray":
        require("ray", "ray")
    queries = open_queries(settings.input)
    columns = pick_columns(
        queries, settings.input_column, settings.truth_column, settings.allow_column, settings.deny_column
    )
    path = _place(settings.output or default_output(settings.input[0]), queries, settings.input)
    read_config(settings.model)
    is_needed = settings.trie is not None and (settings.constrained or columns.kind == "history")
    catalogue = Trie.open(settings.trie) if is_needed and settings.trie else None
    trie, filters = _search_space(settings, catalogue, columns, queries.schema)
    has_lists = filters is not None and filters.has_lists
    options = EngineOptions(beams=settings.beams, filters=has_lists, **settings.engine_options())
    levels = _levels(options, trie)
    make_policy(options.beams, levels, options.score_margin, options.min_beams)
    requested = min(options.beams[-1], settings.top_k or sys.maxsize)
    most_sids, most_items = _most(trie, filters, requested, settings.expand)
    is_text = trie is not None and trie.manifest.id_type == "string"
    field = queries.schema.field
    truth = SidLookup(columns.truth, field(columns.truth).type, trie, levels) if columns.truth else None
    return Plan(
        settings=settings.model_copy(update={"output": path}),
        queries=queries,
        columns=columns,
        units=plan_units([file.row_groups for file in queries.files], settings.unit_rows, settings.limit),
        options=options,
        trie=trie,
        knows_tokens=catalogue is None or check_tokenizer(catalogue, settings.model),
        filters=filters,
        levels=levels,
        prompter=make_prompter(
            field(columns.input), columns.kind, settings.model, settings.template, settings.suffix, catalogue
        ),
        truth=truth,
        requested=requested,
        most_sids=most_sids,
        cutoffs=[k for k in CUTOFFS if k <= most_sids],
        item_cutoffs=[k for k in CUTOFFS if k <= most_items and truth is not None and truth.names_items],
        schema=output_schema(columns, queries.schema, pa.string() if is_text else pa.int64()),
        output=Output(path, _manifest(settings, queries, catalogue, filters)),
    )


def default_output(first: Path) -> Path:
    """`results/<stem>.recall.parquet` for a file, a folder, or the folder of a pattern."""
    named = next((part for part in (first, *first.parents) if part.name and not has_magic(part.name)), first)
    return Path("results") / f"{named.stem}.recall.parquet"


def _levels(options: EngineOptions, trie: Trie | None) -> int:
    """Tokens per SID; imports torch, which a refusal before this need not wait for."""
    from grinf.backend.load import sid_levels

    return sid_levels(options, trie)


def _place(output: Path, queries: Queries, inputs: Sequence[Path]) -> Path:
    """Where the output and what is beside it can be; see `place`."""
    fix = "name a new folder, or FILE.parquet"
    if output.name in ("", ".."):
        raise UsageError(f"--output {output} has no name", fix=fix)
    path = place(output, "--output")
    if {output.suffix, path.suffix} > {".parquet"}:
        why = f"the link leads to {path}, and only one of them is the name of a parquet file"
        raise UsageError(f"--output {output} may be a file or a folder", why, fix)
    if os.path.ismount(path):
        why = "a finished output takes its place by a rename, which that cannot be"
        raise UsageError(f"--output {path} is a mount point", why, "name a new folder in it")
    written = [path, Output(path, {}).rejects, path / "unit.parquet"]
    refuse_inputs(written, [file.path for file in queries.files], inputs, "--output")
    return path


def _search_space(
    settings: RecallSettings, catalogue: Trie | None, columns: Columns, schema: pa.Schema
) -> tuple[Trie | None, Filters | None]:
    """The trie to search, with no view but the one to use; and what the queries may see of it."""
    if catalogue is None or not settings.constrained:
        return None, None
    trie = catalogue.with_views([] if settings.view is None else [settings.view])
    lists = [None if name is None else schema.field(name) for name in (columns.allow, columns.deny)]
    if settings.view is None and trie.deleted is None and not any(lists):
        return trie, None
    return trie, Filters(trie, settings.view, *lists)


def _most(trie: Trie | None, filters: Filters | None, requested: int, expand: str) -> tuple[int, int]:
    """SIDs and items of one query at most: of the SIDs that all queries may see, those with most items."""
    if trie is None:
        return requested, 0
    if filters is not None:
        counts = filters.live.items_of_leaves()
    else:
        counts = np.ones(trie.num_leaves, np.int64) if trie.item_ptr is None else np.diff(trie.item_ptr)
    sids = min(requested, len(counts))
    if expand == "top1" or sids == 0:
        return sids, sids
    return sids, int(np.partition(counts, len(counts) - sids)[-sids:].sum())


def _manifest(
    settings: RecallSettings, queries: Queries, catalogue: Trie | None, filters: Filters | None
) -> dict[str, Any]:
    """What decides the answers."""
    assert settings.model is not None
    spelled = settings.spelled().items()
    return {
        "grinf": __version__,
        **{key.replace("_", "-"): value for key, value in spelled if key not in NOT_CONTENT},
        **{f"input {index}": f"{file.path.name} {file.digest}" for index, file in enumerate(queries.files)},
        "device": _device_type(settings.devices[0]),
        "model": f"{settings.model.name} {_model_identity(settings.model)}",
        "catalogue": None if catalogue is None else catalogue.version,
        "items of the view": "" if filters is None else filters.view_digest,
    }


def _device_type(device: str) -> str:
    """`cpu` or `cuda`: which GPU answers, and how many of them, does not bear on the answers."""
    from torch.cuda import is_available

    return ("cuda" if is_available() else "cpu") if device == "auto" else device.partition(":")[0]


def _model_identity(model: Path) -> str:
    """Digest of names, sizes and times of a checkpoint's files: weights are too large to be read for this."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    stats = [(file.name, file.stat()) for file in files if file.suffix in MODEL_FILES]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return xxhash.xxh3_64(repr(facts).encode()).hexdigest()
