"""The engine stays an afternoon's read: a budget of lines for each part, and for each file.

The budgets are ratchets: what a part has today, with little room. Why the total is what it is stands in
docs/decisions.md.
"""

import pytest

MAX_FILE_LINES = 400
BUDGETS = {
    "kernels_cupy": 4_800,
    "grinf": 20_560,
    "grinf/runtime": 520,
    "grinf/state": 450,
    "grinf/backend": 2_000,
    "grinf/ops": 900,
    "grinf/model": 550,
    "grinf/trie": 2_100,
}
SOURCES = (".py", ".cu", ".cuh")


def lines_of(folder):
    files = [path for path in folder.rglob("*") if path.suffix in SOURCES]
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}


@pytest.mark.parametrize(("package", "budget"), BUDGETS.items())
def test_a_package_keeps_its_budget(repository, package, budget):
    total = sum(lines_of(repository / package).values())
    assert 0 < total <= budget, f"{package} has {total:,} lines"


@pytest.mark.parametrize("package", ["grinf", "kernels_cupy"])
def test_no_file_is_longer_than_one_idea(repository, package):
    lengths = lines_of(repository / package)
    long = {path.name: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}
    assert not long
