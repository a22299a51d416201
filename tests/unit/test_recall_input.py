"""Units, columns, templates and the tokenizer of `grinf recall`, without a model."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grinf.errors import RowError, TrieFileError, UsageError
from grinf.jobs.parquet_files import open_parquet
from grinf.jobs.recall import inputs
from grinf.jobs.recall.columns import Columns, pick_columns
from grinf.jobs.recall.inputs import Queries, QueryFile, UnitReader, open_queries
from grinf.jobs.recall.plan import default_output
from grinf.jobs.recall.prompts import make_prompter, read_messages
from grinf.jobs.recall.tokenizer import PromptTokenizer, Template
from grinf.jobs.recall.units import plan_units
from tests.recall_world import BOS, SID_BEGIN, VOCABULARY, ids_of, save_tokenizer


@given(
    st.lists(st.lists(st.integers(0, 5000), max_size=4), max_size=4),
    st.sampled_from([700, 2048, 10_000]),
    st.none() | st.integers(1, 12_000),
)
def test_units_cover_every_row_once_and_in_order(
    row_groups: list[list[int]], most_rows: int, limit: int | None
) -> None:
    units = plan_units(row_groups, most_rows, limit)
    rows = [(u.file, u.row_group, u.start + i) for u in units for i in range(u.num_rows)]
    every = [(f, g, i) for f, groups in enumerate(row_groups) for g, n in enumerate(groups) for i in range(n)]
    assert rows == every[:limit]
    assert [unit.index for unit in units] == list(range(len(units)))
    assert all(0 < unit.num_rows <= most_rows for unit in units)
    assert [unit.first_row for unit in units] == np.cumsum([0, *(u.num_rows for u in units)])[:-1].tolist()


def test_units_are_read_in_any_order_from_large_and_small_row_groups(tmp_path: Path) -> None:
    table = pa.table({"query": [f"q{i}" for i in range(7000)], "x": range(7000)})
    pq.write_table(table, tmp_path / "q.parquet", row_group_size=5000)
    queries = open_queries([tmp_path])
    units = plan_units([file.row_groups for file in queries.files], 2048)
    reader = UnitReader(queries, ["query", "x"])
    for unit in [*units, units[0], units[2], units[1], units[-1]]:
        part = reader.read(unit)
        assert part["x"].to_pylist() == list(range(unit.first_row, unit.first_row + unit.num_rows))
        assert part.schema.names == ["query", "x"]


def test_a_unit_further_on_costs_no_second_look_at_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of several gets every other unit, say; starting again each time would read a file n times."""
    pq.write_table(pa.table({"x": range(60_000)}), tmp_path / "q.parquet", row_group_size=30_000)
    queries = open_queries([tmp_path])
    opened: list[Path] = []
    monkeypatch.setattr(inputs, "open_parquet", lambda path: opened.append(path) or open_parquet(path))
    reader = UnitReader(queries, ["x"])
    for unit in plan_units([file.row_groups for file in queries.files], 1000)[1::4]:
        part = reader.read(unit)["x"].to_pylist()
        assert part == list(range(unit.first_row, unit.first_row + unit.num_rows))
    assert len(opened) == 2


def pick(schema: dict[str, pa.DataType], **names: str) -> Columns:
    file = QueryFile(Path("q.parquet"), "", (0, 0, 0), (1,), tuple(schema))
    return pick_columns(Queries((file,), pa.schema(schema)), names.get("input"), names.get("truth"))


@pytest.mark.parametrize(
    ("name", "type_", "kind"),
    [
        ("input_ids", pa.list_(pa.int32()), "input_ids"),
        ("input_ids", pa.list_(pa.uint64(), 4), "input_ids"),
        ("prompt", pa.large_string(), "text"),
        ("messages", pa.string(), "messages"),
        ("messages", pa.list_(pa.struct({"role": pa.string()})), "messages"),
        ("history", pa.list_(pa.int64()), "history"),
        ("history", pa.large_list(pa.list_(pa.int64())), "history"),
        ("tokens", pa.list_(pa.int64()), "input_ids"),
        ("hist_video_pid", pa.list_(pa.int64()), "history"),
        ("names", pa.list_(pa.string()), "history"),
        ("body", pa.string(), "text"),
    ],
)
def test_a_column_is_what_its_type_and_name_say(name: str, type_: pa.DataType, kind: str) -> None:
    assert pick({"uid": pa.int64(), name: type_}, input=name).kind == kind


def test_columns_are_found_by_name() -> None:
    text, ids = pa.string(), pa.list_(pa.int64())
    columns = pick(
        {"query": text, "row": text, "input_row": text, "input_ids": ids, "uid": text, "t": ids}, truth="t"
    )
    assert (columns.input, columns.query_id, columns.truth) == ("input_ids", "uid", "t")
    assert columns.carried == {"query": "query", "row": "input_input_row", "input_row": "input_row", "t": "t"}
    assert columns.read == ["input_ids", "uid", "query", "row", "input_row", "t"]


def test_templates() -> None:
    assert Template.parse('{"q": {prompt}} <s>') == Template('{"q": ', "} <s>", "")
    assert Template.parse("{history:, }x") == Template("", "x", ", ")
    for bad in ("", "{prompts}", "{prompt}{query}"):
        with pytest.raises(UsageError, match="cannot be filled"):
            Template.parse(bad)


def prompts(folder: Path, kind: str, values: list, template: str | None = None, suffix: tuple = ()) -> list:
    column = pa.chunked_array([pa.array(values)])
    prompter = make_prompter(pa.field("c", column.type), kind, folder, template, suffix, None)
    return [prompt if isinstance(prompt, RowError) else prompt.tolist() for prompt in prompter(column)]


def test_the_token_that_begins_a_text_is_added_once_and_the_one_that_ends_it_never(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, bos=True)
    bos, sid = VOCABULARY[BOS], VOCABULARY[SID_BEGIN]
    assert prompts(tmp_path, "text", ["w1", "<s> w1", ""]) == [[bos, 1], [bos, 1], [bos]]
    assert prompts(tmp_path, "text", ["w1"], "w2 {prompt}", (SID_BEGIN,)) == [[bos, 2, 1, sid]]
    assert prompts(tmp_path, "text", ["w4"], "chat")[0][1:] == ids_of("w4 w1 w2")
    assert prompts(tmp_path, "input_ids", [[5]], None, (SID_BEGIN,)) == [[5, sid]]


def test_a_tokenizer_is_needed_only_for_text(tmp_path: Path) -> None:
    assert prompts(tmp_path, "input_ids", [[5]]) == [[5]]
    with pytest.raises(TrieFileError, match="no tokenizer"):
        prompts(tmp_path, "text", ["w1"])
    with pytest.raises(TrieFileError, match="no tokenizer"):
        prompts(tmp_path, "input_ids", [[5]], None, (SID_BEGIN,))


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert not PromptTokenizer(tmp_path).has_chat_template
    for kind, template in (("messages", None), ("text", "chat")):
        with pytest.raises(UsageError, match="no chat template"):
            prompts(tmp_path, kind, ["[]"], template)


@pytest.mark.parametrize(
    "value", ["", "{}", "[1]", '[{"role": 1, "content": ""}]', [{"role": "u"}], "[" * 100_000]
)
def test_what_is_no_conversation(value: object) -> None:
    with pytest.raises(RowError) as refused:
        read_messages(value)
    assert refused.value.code == "bad_type"
    assert len(refused.value.what) < 150


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("q.parquet", "results/q.recall.parquet"),
        ("data/day=1/", "results/day=1.recall.parquet"),
        ("data/day=*/q-*.parquet", "results/data.recall.parquet"),
    ],
)
def test_default_output(given: str, output: str) -> None:
    assert default_output(Path(given)) == Path(output)
