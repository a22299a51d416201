"""The layers and their contracts hold, and every layer says in a sentence what it is."""

import ast
import subprocess
import sys
import tomllib


def test_the_import_contracts_hold(repository):
    finished = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[finished.stdout.find("Contracts") :]


def test_every_package_says_what_it_is_and_holds_no_logic(repository):
    packages = list((repository / "grinf").glob("*/__init__.py"))
    assert len(packages) >= 9
    for path in packages:
        first, *rest = ast.parse(path.read_text()).body
        assert isinstance(first, ast.Expr), path
        assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in rest), path


def test_the_version_is_the_same_everywhere(repository):
    import grinf

    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert grinf.__version__ == project["version"]


def test_the_public_names_can_be_imported_and_nothing_else():
    import grinf

    assert [getattr(grinf, name).__name__ for name in grinf.__all__ if name != "__version__"] == [
        "Engine",
        "EngineOptions",
        "RecallResult",
        "Request",
        "Trie",
    ]
    assert not hasattr(grinf, "engine_of_a_car")
