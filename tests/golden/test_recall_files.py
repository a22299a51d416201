"""What `grinf recall` puts on the disk: units that prove what they are, where it goes, how much it is."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grinf.errors import StorageError, UsageError
from grinf.jobs.recall import output, run_recall, space
from grinf.jobs.recall.plan import make_plan
from tests.recall_world import World, draw_prompts, ignore, make_world, stop_after, write


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("recall_files"))


QUERIES = {
    "input_ids": [[1], None, [2, 3], [4], [5, 6], None, [7], [8, 9]],
    "truth": [[100 + row] for row in range(8)],
}
CHANGES = {"unit_rows": "2", "truth_column": "truth"}


@pytest.fixture(scope="module")
def begun(world: World) -> Path:
    """A folder with two jobs of four units of two rows; the first and the third have a rejected row each."""
    folder = world.folder / "begun"
    folder.mkdir()
    write(folder / "queries.parquet", QUERIES)
    for name in ("out", "out.parquet"):
        with pytest.raises(KeyboardInterrupt):
            go_on(world, folder / name, stop_after(7))
    go_on(world, folder / "whole")
    return folder


def begin(begun: Path, path: Path) -> Path:
    """Put a job at a path that has committed three of its units; return where they are."""
    shutil.copy(begun / "queries.parquet", path.parent)
    partial = path.with_name(f"{path.name}.partial")
    shutil.copytree(begun / partial.name, partial)
    return partial


def go_on(world: World, path: Path, on_progress: Callable[..., None] = ignore, **changes: Any) -> Any:
    queries = path.with_name("queries.parquet")
    settings = world.settings(input=str(queries), output=str(path), **(CHANGES | changes))
    return run_recall(settings, on_progress)


# Committed units that are no longer what they were.


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def take_another(file: Path) -> None:
    shutil.copy(file.with_name("unit-000000.parquet"), file)


def write_plainly(file: Path) -> None:
    pq.write_table(pq.read_table(file), file)


def delete(file: Path) -> None:
    file.unlink()


DAMAGE = {
    truncate: "its bytes are not those that were written",
    empty: "its bytes are not those that were written",
    flip: "its bytes are not those that were written",
    write_plainly: "its bytes are not those that were written",
    take_another: "it is unit 0 of 2 rows from row 0 on",
}


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("folder", ["", "_grinf/rejects"])
@pytest.mark.parametrize("damage", [*DAMAGE, delete])
def test_a_damaged_unit_is_named_with_what_helps(
    world: World, begun: Path, tmp_path: Path, name: str, folder: str, damage: Callable[[Path], None]
) -> None:
    partial = begin(begun, tmp_path / name)
    file, answers = partial / folder / "unit-000002.parquet", partial / "unit-000002.parquet"
    kept = {path.name: path.read_bytes() for path in partial.glob("unit-*")}
    damage(file)
    if damage is delete and not folder:  # Then it is as if it had never been.
        assert go_on(world, tmp_path / name).units_kept == 2
        return
    with pytest.raises(StorageError) as told:
        go_on(world, tmp_path / name)
    assert told.value.what == f"{file} is not what was committed"
    if damage is delete:
        assert told.value.why == "0 rejected queries are there, 1 were written"
    else:
        assert told.value.why == DAMAGE[damage]
    assert told.value.fix == f"remove {answers}: the same command answers its rows again"
    assert told.value.exit_code == 7
    assert not (tmp_path / name).exists()
    answers.unlink()
    assert go_on(world, tmp_path / name).units_kept == 2
    assert go_on(world, begun / "whole").summary == go_on(world, tmp_path / name).summary
    assert pq.read_table(tmp_path / name).equals(pq.read_table(begun / "whole"))
    if name == "out":
        assert kept == {unit: (tmp_path / name / unit).read_bytes() for unit in kept}


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("damage", [truncate, flip, delete, take_another])
def test_what_befalls_a_unit_while_the_job_runs_is_found_at_its_end(
    world: World, begun: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    file = begin(begun, tmp_path / name) / "unit-000001.parquet"
    expected = "is gone" if damage is delete else "is not what was committed"

    def strike(stage: str, done: int, whole: int | None) -> None:
        if stage == "queries" and file.exists():
            damage(file)

    with pytest.raises(StorageError, match=f"unit-000001.parquet {expected}") as told:
        go_on(world, tmp_path / name, strike)
    assert "the same command" in told.value.fix
    assert not (tmp_path / name).exists()
    file.unlink(missing_ok=True)
    assert go_on(world, tmp_path / name).answered == 2


def test_two_units_that_were_swapped_are_found(world: World, begun: Path, tmp_path: Path) -> None:
    partial = begin(begun, tmp_path / "out.parquet")
    one, other = partial / "unit-000000.parquet", partial / "unit-000002.parquet"
    one.rename(partial / "x")
    other.rename(one)
    (partial / "x").rename(other)
    with pytest.raises(
        StorageError, match=r"unit-000000\.parquet is not .*\nit is unit 2 of 2 rows from row 4 on"
    ):
        go_on(world, tmp_path / "out.parquet")


def test_a_unit_of_another_job_is_found(world: World, begun: Path, tmp_path: Path) -> None:
    partial = begin(begun, tmp_path / "out.parquet")
    go_on(world, tmp_path / "other", beams="5")
    shutil.copy(tmp_path / "other" / "unit-000001.parquet", partial)
    with pytest.raises(
        StorageError,
        match=r"unit-000001\.parquet is not what was committed\nit is of other inputs or settings",
    ):
        go_on(world, tmp_path / "out.parquet")


def test_no_flipped_bit_of_a_unit_is_passed_over(world: World, begun: Path, tmp_path: Path) -> None:
    partial = begin(begun, tmp_path / "out")
    plan = make_plan(
        world.settings(input=str(tmp_path / "queries.parquet"), output=str(tmp_path / "out"), **CHANGES)
    )
    parts, file = output.Parts(plan.output), partial / "unit-000000.parquet"
    assert parts.read(plan.units[0]) is not None
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(StorageError):
            parts.read(plan.units[0])


@pytest.mark.parametrize("damage", [empty, delete])
def test_a_lost_manifest_loses_no_unit(
    world: World, begun: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    partial = begin(begun, tmp_path / "out")
    damage(partial / "_grinf" / "manifest.json")
    with pytest.raises(StorageError, match="it is of other inputs or settings"):
        go_on(world, tmp_path / "out", beams="5")
    assert go_on(world, tmp_path / "out").units_kept == 3
    assert go_on(world, tmp_path / "out").status == "unchanged"


def test_a_finished_folder_with_a_gap_is_no_finished_folder(
    world: World, begun: Path, tmp_path: Path
) -> None:
    begin(begun, tmp_path / "out")
    go_on(world, tmp_path / "out")
    (tmp_path / "out" / "unit-000002.parquet").unlink()
    with pytest.raises(UsageError, match=r"unit-000002\.parquet is gone") as told:
        go_on(world, tmp_path / "out")
    assert "--overwrite" in told.value.fix
    assert go_on(world, tmp_path / "out", overwrite="yes").answered == 8
    assert pq.read_table(tmp_path / "out").num_rows == 8


def test_rejected_queries_that_were_taken_away_are_not_missed(
    world: World, begun: Path, tmp_path: Path
) -> None:
    begin(begun, tmp_path / "out.parquet")
    assert go_on(world, tmp_path / "out.parquet").rejects == tmp_path / "out.rejects.parquet"
    (tmp_path / "out.rejects.parquet").unlink()
    report = go_on(world, tmp_path / "out.parquet")
    assert (report.status, report.rejected, report.rejects) == ("unchanged", 2, None)


def test_a_file_of_someone_else_stays_out_of_the_output(world: World, begun: Path, tmp_path: Path) -> None:
    for name in ("out", "out.parquet"):
        mine = begin(begun, tmp_path / name) / "unit-000001.parquet.bak"
        mine.write_text("mine")
        if name == "out":
            with pytest.raises(StorageError, match=r"unit-000001\.parquet\.bak is not of the job"):
                go_on(world, tmp_path / name)
            mine.rename(tmp_path / "mine")
            mine = tmp_path / "mine"
        go_on(world, tmp_path / name)
        assert mine.read_text() == "mine"
        assert pq.read_table(tmp_path / name).num_rows == 8


# Places.


@pytest.mark.parametrize("end", ["out.parquet", "out"])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file.txt/{}", "file.txt is no folder"),
        ("file.txt/deep/{}", "file.txt is no folder"),
        ("n" * 300 + "{}", "a name is too long"),
        ("n" * 235 + "{}", "a name is too long"),
        ("new/" + "n" * 300 + "/{}", "a name is too long"),
        ("loop/{}", "loop is no folder"),
        ("loop{}", "the links lead in a circle"),
    ],
)
def test_a_place_where_nothing_can_be_is_refused(
    world: World, tmp_path: Path, path: str, why: str, end: str
) -> None:
    (tmp_path / "file.txt").write_text("mine")
    for name in ("loop", f"loop{end}"):
        (tmp_path / name).symlink_to(name)
    queries = write(tmp_path / "queries.parquet", QUERIES)
    before = sorted(tmp_path.iterdir())
    place = tmp_path / path.format(end)
    with pytest.raises(UsageError) as told:
        world.recall(place, input=str(queries))
    assert told.value.what == f"--output {place} cannot be written"
    assert why in told.value.why
    assert (told.value.fix, told.value.exit_code) == ("choose another --output", 2)
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_file_system_refuses_is_told(world: World, tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    queries = write(tmp_path / "queries.parquet", QUERIES)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="Permission denied") as told:
        world.recall(tmp_path / "out", input=str(queries))
    assert told.value.what == f"cannot write {tmp_path / 'out.partial'}"


def test_a_file_system_without_links_will_do_and_one_without_locks_is_told(
    world: World, tmp_path: Path, monkeypatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(os, "link", refuse)
    assert world.recall(tmp_path / "out", QUERIES, **CHANGES).status == "done"
    monkeypatch.setattr(output.fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="No locks available"):
        go_on(world, tmp_path / "other")


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_followed(world: World, tmp_path: Path, name: str, there: bool) -> None:
    real, link = tmp_path / "far" / name, tmp_path / name
    queries = write(tmp_path / "queries.parquet", QUERIES)
    (tmp_path / "far").mkdir()
    link.symlink_to(Path("far") / name)
    if there:
        world.recall(real, input=str(queries), beams="5")
    changes = {"input": str(queries), "overwrite": "yes", **CHANGES}
    seen: list[list[str]] = []

    def look(stage: str, done: int, whole: int | None) -> None:
        if stage != "queries":
            return
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        assert (tmp_path / "far" / f"{name}.partial" / "_grinf" / "lock").exists()
        for other in (real, link):
            with pytest.raises(UsageError, match=f"far/{name}.partial is in use"):
                world.recall(other, **changes)

    report = run_recall(world.settings(output=str(link), **changes), look)
    assert (report.status, report.output) == ("done", real)
    assert seen[0] == ["far", name, "queries.parquet"]
    assert link.readlink() == Path("far") / name
    assert pq.read_table(real).num_rows == 8
    rejects = {"out.rejects.parquet"} if name == "out.parquet" else set()
    assert {path.name for path in (tmp_path / "far").iterdir()} == {name} | rejects
    for other in (real, link):
        assert world.recall(other, **changes).status == "unchanged"


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_a_job_goes_on_by_the_link_and_by_its_target(
    world: World, begun: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "link").mkdir()
    write(tmp_path / "link" / "queries.parquet", QUERIES)
    (tmp_path / "link" / name).symlink_to(tmp_path / name)
    begin(begun, tmp_path / name)
    report = go_on(world, tmp_path / "link" / name)
    assert (report.units_kept, report.output) == (3, tmp_path / name)


def test_a_link_between_a_file_and_a_folder_is_refused(world: World, tmp_path: Path) -> None:
    for link, real in (("out.parquet", "folder"), ("folder", "out.parquet")):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / link).symlink_to(tmp_path / real)
        with pytest.raises(UsageError, match="may be a file or a folder"):
            world.recall(tmp_path / "x" / link, QUERIES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_a_partial_folder_that_is_a_link_is_in_the_way(world: World, begun: Path, tmp_path: Path) -> None:
    partial = begin(begun, tmp_path / "out")
    partial.rename(tmp_path / "elsewhere")
    partial.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"out\.partial is in the way"):
        go_on(world, tmp_path / "out")
    assert len(list((tmp_path / "elsewhere").glob("unit-*"))) == 3


def test_a_mount_point_is_refused_before_the_work(world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("grinf.jobs.recall.plan.os.path.ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(UsageError, match="out is a mount point"):
        world.recall(tmp_path / "out", QUERIES)
    for name in (".", ".."):
        with pytest.raises(UsageError, match="has no name"):
            run_recall(world.settings(input=str(tmp_path / "queries.parquet"), output=name), ignore)


class Killed(BaseException):
    """The process is gone."""


def kill_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    """Let the file system change so many times, and then no more, as where a process is killed."""
    done = 0

    def until_then(change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > moment:
                raise Killed
            return change(*args, **kwargs)

        return counted

    for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "link", "fsync"):
        patch.setattr(os, name, until_then(getattr(os, name)))


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_at_any_moment_of_the_end_loses_and_leaves_nothing(
    world: World, begun: Path, tmp_path: Path, monkeypatch, name: str, replaces: bool
) -> None:
    start, end = tmp_path / "start", tmp_path / ("whole.parquet" if name == "out.parquet" else "whole")
    changes = {"overwrite": "yes"} if replaces else {}
    start.mkdir()
    shutil.copy(begun / "queries.parquet", start)
    if replaces:
        go_on(world, start / name, beams="5")
    begin(begun, start / name)
    with monkeypatch.context() as patch:
        patch.setattr(output.Parts, "finish", lambda *_: stop_after(0)("queries", 0, 0))
        with pytest.raises(KeyboardInterrupt):
            go_on(world, start / name, **changes)
    shutil.copy(begun / "queries.parquet", tmp_path)
    go_on(world, end)
    moment, was_killed = 0, True
    while was_killed:
        path = shutil.copytree(start, tmp_path / str(moment)) / name
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                go_on(world, path, **changes)
                was_killed = False
            except Killed:
                moment += 1
        assert go_on(world, path, **changes).answered == 0
        left = {one.name for one in path.parent.iterdir()} - {"queries.parquet"}
        assert left == {name} | ({"out.rejects.parquet"} if name == "out.parquet" else set())
        assert pq.read_table(path).equals(pq.read_table(end))
        shutil.rmtree(path.parent)
    assert moment > 12


def test_another_process_that_ended_just_before_has_done_it(
    world: World, tmp_path: Path, monkeypatch
) -> None:
    queries = write(tmp_path / "queries.parquet", QUERIES)
    opened = output.Output.open

    def open_late(self: output.Output, **options: bool) -> Any:
        monkeypatch.undo()
        world.recall(tmp_path / "out", input=str(queries))
        return opened(self, **options)

    monkeypatch.setattr(output.Output, "open", open_late)
    assert world.recall(tmp_path / "out", input=str(queries)).status == "unchanged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "queries.parquet"]


# Room.


def on_disk(paths: Any) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


SHAPES = {
    "tiny": ([40], 1, 10, 1.25),
    "large": ([800], 200, 300, 1.25),
    "mixed": ([1] * 12 + [300] * 3, 300, 400, 1.6),
}
"""Rows of the row groups, --unit-rows, after how many queries to judge, and the factor to hold."""


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_what_will_be_written_is_what_is_written(
    world: World, tmp_path: Path, monkeypatch, shape: str, name: str
) -> None:
    groups, unit_rows, seen, factor = SHAPES[shape]
    rows = sum(groups)
    prompts = draw_prompts(np.random.default_rng(0), rows)
    prompts = [None if row % 10 == 4 else prompt for row, prompt in enumerate(prompts)]
    table = pa.table({"input_ids": prompts, "truth": [[100 + row % 60] for row in range(rows)]})
    with pq.ParquetWriter(tmp_path / "queries.parquet", table.schema) as writer:
        start = 0
        for group in groups:
            writer.write_table(table.slice(start, group), row_group_size=group)
            start += group
    changes = {"unit_rows": str(unit_rows), "truth_column": "truth", "beams": "2"}
    settings = world.settings(input=str(tmp_path / "queries.parquet"), output=str(tmp_path / name), **changes)
    with pytest.raises(KeyboardInterrupt):
        run_recall(settings, stop_after(seen))
    plan = make_plan(settings)
    partial = plan.output.partial
    before = set(partial.rglob("*.parquet"))
    estimate = space.needed_bytes(plan.output, plan.units)
    assert estimate is not None
    monkeypatch.setattr(output, "_discard", lambda folder: None)
    run_recall(settings, ignore)
    if name == "out":
        before = {tmp_path / name / path.relative_to(partial) for path in before}
    written = on_disk(path for path in tmp_path.rglob("*.parquet") if path not in before)
    written -= (tmp_path / "queries.parquet").stat().st_blocks * 512
    assert written / factor < estimate < written * factor


def test_a_small_first_unit_is_no_judge_of_large_ones(world: World, tmp_path: Path, monkeypatch) -> None:
    """By its size a row, a unit of one row asks for a hundred times as much."""
    tables = [pa.table({"input_ids": [[1]] * rows}) for rows in (1, 500, 500)]
    with pq.ParquetWriter(tmp_path / "queries.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    settings = world.settings(
        input=str(tmp_path / "queries.parquet"), output=str(tmp_path / "out"), beams="2"
    )
    usage = shutil.disk_usage(tmp_path)._replace(free=400_000)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: usage)
    assert run_recall(settings, ignore).status == "done"
    new = make_plan(settings.model_copy(update={"output": tmp_path / "new"}))
    assert space.needed_bytes(new.output, new.units) is None
