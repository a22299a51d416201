"""A run's folder that something has damaged is told with its place; one that a crash cut off goes on."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grinf.config.load import resolve
from grinf.config.settings import BenchSettings
from grinf.errors import EnvironmentFault, ExitCode, UsageError
from grinf.jobs.bench.compare import compare_runs
from grinf.jobs.bench.engines import model_facts
from grinf.jobs.bench.journal import read_journal
from grinf.jobs.bench.run_dir import RunDir
from grinf.jobs.bench.summary import summarise
from grinf.jobs.bench.sweep import run_bench

FLAGS = {"engine": "sim:", "preset": "smoke", "input_len": "100", "beams": "900"}


def bench(folder, **flags):
    return run_bench(resolve(BenchSettings, FLAGS | {"output": str(folder)} | flags), lambda *_: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("bench")).run.path


@pytest.fixture
def run(finished, tmp_path):
    return RunDir(shutil.copytree(finished, tmp_path / "results" / finished.name))


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: b"", "line 1"),
        (lambda text: b"\x00\xff garbage\n" + text, "line 1 "),
        (lambda text: text.replace(b"\n", b"\n\xff\xfe\n", 1), "line 2 "),
        (lambda text: text.replace(b"\n", b"\n[1]\n", 1), "line 2 is damaged\nit is no JSON object"),
        (lambda text: text.replace(b"\n", b'\n{"event": "probe", "po\n', 1), "line 2 "),
        (lambda text: text.replace(b"\n", b'\n{"point": "p"}\n', 1), "it names no event"),
        (lambda text: text.partition(b"\n")[2], "begins with the terms"),
        (replaced(b'"event": "start"', b'"event": "begin"'), "'begin' is no event"),
        (replaced(b'"stage": "floor"', b'"stage": "flour"'), "stage: "),
        (replaced(b'"concurrency": 1', b'"concurrency": "one"'), "concurrency: "),
        (replaced(b'"probe_id"', b'"probe"'), "probe_id: "),
        (
            replaced(b'"event": "probe", "point": "sim_', b'"event": "probe", "point": "simulated_'),
            "no point",
        ),
        (replaced(b'"preset": "smoke"', b'"preset": "smog"'), "preset"),
        (replaced(b'"sla": ["p99:100ms"]', b'"sla": ["p99:100"]'), "has no unit"),
        (replaced(b'"sla": ["p99:100ms"]', b'"sla": []'), "no SLA"),
        (replaced(b'"sla": ["p99:100ms"]', b'"sla": "p99:100ms"'), "sla: "),
        (replaced(b'"arrival": "poisson"', b'"arrival": "gamma"'), "arrival: "),
        (replaced(b'"devices": 1', b'"devices": 0'), "devices: "),
        (replaced(b'"devices": 1', b'"devices": "2"'), "devices: "),
        (replaced(b'"concurrency": 1', b'"concurrency": 0'), "concurrency: "),
        *(
            (replaced(b'"rate": null', b'"rate": ' + rate), "rate: ")
            for rate in (b"NaN", b"-5", b"0", b"1e999", b'"fast"')
        ),
        (replaced(b'"status": "skipped"', b'"verdict": "skipped"'), "lacks 'status'"),
        (replaced(b'"status": "skipped"', b'"status": "ok"'), "'ok' is not what its faults say"),
        (replaced(b'"status": "skipped"', b'"status": 3'), "3 is not what its faults say"),
        (replaced(b'"faults": []', b'"faults": 5'), "faults: "),
        (replaced(b'"input_len": 100', b'"input_len": "long"'), "input_len"),
        (replaced(b'"config_hash"', b'"hash"'), "config_hash: Field required"),
    ],
)
def test_a_damaged_journal_is_told_with_its_line(run, damage, message):
    journal = run.path / "journal.jsonl"
    journal.write_bytes(damage(journal.read_bytes()))
    for use in (
        lambda: summarise(run),
        lambda: compare_runs([run.path, run.path]),
        lambda: bench(run.path.parent, resume=True),
    ):
        with pytest.raises(EnvironmentFault) as told:
            use()
        assert told.value.exit_code is ExitCode.ENVIRONMENT
        assert str(journal) in str(told.value)
        assert message in str(told.value)


ENVIRONMENTS = (
    b'{"load_average": null}',
    b'{"cores": "two"}',
    b'{"gpu_processes": 3}',
)
"""JSON, but none of a machine."""


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"7", *ENVIRONMENTS])
def test_a_damaged_environment_is_told(run, text):
    journal = run.path / "journal.jsonl"
    if text in ENVIRONMENTS:  # A simulated engine runs on no machine.
        journal.write_bytes(journal.read_bytes().replace(b'"engine": "sim:"', b'"engine": "grinf"'))
        journal.write_bytes(journal.read_bytes().replace(b'"point": "sim_', b'"point": "grinf_'))
    (run.path / "env.json").write_bytes(text)
    with pytest.raises(EnvironmentFault, match=r"env\.json is damaged"):
        compare_runs([run.path, run.path])


@pytest.mark.parametrize("kind", ["missing", "cut", "foreign", "another", "retyped"])
def test_a_damaged_table_is_told(run, kind):
    file = next(iter(read_journal(run).records.values()))[0].file
    path = run.path / file
    table = pq.ParquetFile(path).read()
    match kind:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:100])
        case "another":
            path.write_bytes((run.path / next(iter(read_journal(run).records.values()))[1].file).read_bytes())
        case "foreign":
            pq.write_table(pa.table({"a": [1]}), path)
        case _:
            words = pa.array(["soon"] * len(table))
            pq.write_table(table.set_column(table.column_names.index("t_done_ns"), "t_done_ns", words), path)
    with pytest.raises(EnvironmentFault) as told:
        summarise(run)
    assert file in str(told.value)


@pytest.mark.parametrize(
    "torn", [b'{"event": "probe", "poi', b"\xff\x00", b'{"event": "done", "point": "x"}']
)
def test_a_torn_line_makes_room_for_the_next_event(run, torn):
    journal = run.path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + torn)
    assert summarise(run).rows[0]["status"] == "ok"
    point = read_journal(run).points[0].key
    run.append("verify", point=point, status="ok")
    line = json.dumps({"event": "verify", "point": point, "status": "ok"}).encode()
    assert journal.read_bytes() == whole + line + b"\n"
    assert read_journal(run).said["verify", point]["status"] == "ok"


@pytest.mark.parametrize("kind", [b'"workload_hash"', b'"model_hash"'])
def test_a_run_is_not_resumed_with_another_model_or_catalogue(run, kind):
    journal = run.path / "journal.jsonl"
    lines = [line for line in journal.read_bytes().splitlines(keepends=True) if b'"done"' not in line]
    journal.write_bytes(re.sub(kind + rb': "\w+"', kind + b': "0123"', b"".join(lines)))
    with pytest.raises(UsageError, match="another one than when the run began"):
        bench(run.path.parent, resume=True)


def test_what_a_model_is_decides_the_work(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("{} ")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    seen = [model_facts(tmp_path / name) for name in ("a.json", "b.json", "model")]
    (folder / "model.safetensors").write_bytes(b"12")
    seen.append(model_facts(folder))
    assert len({repr(facts) for facts in seen}) == 3
    assert seen[0] == seen[2]


def no_utf8(file):
    file.write_bytes(file.read_bytes().replace(b"t_sched_ns", b"t_sched_\xff\xff"))


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"PAR1"), no_utf8])
def test_a_table_that_is_gone_or_damaged_is_told(run, harm):
    harm(file := next(run.path.glob("requests/*/probe=3.parquet")))
    with pytest.raises(EnvironmentFault, match=r"probe=3\.parquet is damaged") as told:
        summarise(run)
    assert told.value.why
    assert "measure again" in told.value.fix
    assert str(file) in str(told.value)


def test_a_table_of_requests_packs_its_numbers_and_reads_back_whole(run):
    file = next(run.path.glob("requests/*/*.parquet"))
    columns = pq.read_metadata(file).row_group(0)
    encodings = {c["path_in_schema"]: c["encodings"] for c in columns.to_dict()["columns"]}
    for name in ("req_id", "t_done_ns", "step_ns.list.element"):
        assert "DELTA_BINARY_PACKED" in encodings[name]
    assert "BYTE_STREAM_SPLIT" in encodings["e2e_ms"]
    assert "RLE_DICTIONARY" in encodings["phase"]
    table = run.read_table(str(file.relative_to(run.path)))
    run.write_table("again.parquet", table)
    assert run.read_table("again.parquet").equals(table)
    assert (table["t_done_ns"].to_numpy() >= table["t_sched_ns"].to_numpy()).all()
