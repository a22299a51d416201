"""`grinf version`: the version of grinf."""

import platform

from grinf import __version__
from grinf.cli.render import CommandResult


def command() -> CommandResult:
    """Show the version."""
    data = {"version": __version__, "python": platform.python_version()}
    return CommandResult("version", data, messages=[f"grinf {__version__}"])
