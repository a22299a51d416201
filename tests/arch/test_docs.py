"""What the README and the documentation show of the command line exists."""

import re

import pytest
import typer

from grinf.cli.app import COMMANDS, load_command

CODE = re.compile(r"```.*?```|`[^`\n]+`|^ {4}.+$", re.DOTALL | re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
GLOBAL = {"--json", "--quiet", "--debug", "--help", "--install-completion", "--show-completion"}


def flags_of(command) -> set[str]:
    """Flags of a command and of its sub-commands."""
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(flags_of(sub) for sub in getattr(command, "commands", {}).values()))


def loaded(name):
    command = load_command(name)
    if isinstance(command, typer.Typer):
        return typer.main.get_command(command)
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app)


@pytest.fixture(scope="module")
def flags():
    return {name: flags_of(loaded(name)) | GLOBAL for name in COMMANDS}


def pages(repository):
    return [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]


def commands_shown(text):
    """Command lines of `grinf` in the code of a page, with continued lines joined."""
    code = "\n".join(found[0].strip("`") for found in CODE.finditer(text)).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in code.splitlines()]
    return [line.partition("#")[0] for line in lines if line.startswith("grinf ")]


def test_every_command_line_shown_names_existing_commands_and_flags(repository, flags):
    wrong = []
    for page in pages(repository):
        for line in commands_shown(page.read_text(encoding="utf-8")):
            name = line.split()[1] if len(line.split()) > 1 else ""
            known = GLOBAL if name.startswith("-") else flags.get(name, set())
            if not known or set(FLAG.findall(line)) - known:
                wrong.append(f"{page.name}: {line}")
    assert not wrong


def test_every_flag_named_on_its_own_exists(repository, flags):
    known = set.union(*flags.values())
    wrong = []
    for page in pages(repository):
        spans = re.findall(r"`(--[^`\n]+)`", page.read_text(encoding="utf-8"))
        wrong += [
            f"{page.name}: {flag}" for span in spans for flag in FLAG.findall(span) if flag not in known
        ]
    assert not wrong
