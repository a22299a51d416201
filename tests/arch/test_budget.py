"""The project stays an afternoon's read: a budget of lines for each package, and for each file."""

import pytest

MAX_FILE_LINES = 400
BUDGETS = {"grinf": 9_000, "kernels_cupy": 4_500}
SOURCES = (".py", ".cu", ".cuh")


def lines_of(folder):
    files = [path for path in folder.rglob("*") if path.suffix in SOURCES]
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}


@pytest.mark.parametrize(("package", "budget"), BUDGETS.items())
def test_a_package_keeps_its_budget(repository, package, budget):
    total = sum(lines_of(repository / package).values())
    assert 0 < total <= budget, f"{package} has {total:,} lines"


@pytest.mark.parametrize("package", BUDGETS)
def test_no_file_is_longer_than_one_idea(repository, package):
    lengths = lines_of(repository / package)
    long = {path.name: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long
