"""The `grinf` command: which commands there are, and how an error becomes an exit code.

A command is a module `grinf/cli/NAME.py` that defines `command`: a function, or a `typer.Typer` where it has
sub-commands. It is imported only when it is the one to run, so that `grinf --help` stays quick. In general:

    @settings_command(RecallSettings)                # flags, GRINF_* and files, resolved and checked
    def command(settings: RecallSettings, console: Console) -> CommandResult:
        "Find the items of every query."             # the docstring is the help text
        from grinf.jobs.recall import run_recall     # heavy imports inside
        with console.progress() as on_progress:
            report = run_recall(settings, on_progress)
        return CommandResult("recall", data={...}, tables=[...], messages=[...], exit_code=...)

A sub-command with flags of its own takes `ctx: typer.Context` and gets the console by
`ctx.ensure_object(Console)`. A command returns its result and prints nothing. `--json`, `--quiet` and
`--debug` may stand anywhere and are handled here. `grinf/cli/doctor.py` is a small example.
"""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from grinf.cli.render import CommandResult, Console, silence
from grinf.errors import EnvironmentFault, ExitCode, GrinfError, StorageError, UsageError

COMMANDS = {
    "build-trie": "Build a trie of SIDs and items from parquet.",
    "trie": "Look into a trie, export it, or make a view of it.",
    "make-sids": "Make SIDs from item embeddings by residual k-means.",
    "recall": "Recall items for every query of a parquet file.",
    "bench": "Find the highest request rate that keeps a latency SLA.",
    "doctor": "Check this machine, the model and the trie.",
    "demo": "Build a small retriever from real data and try it.",
    "version": "Show the version.",
}
"""What the first help screen says of each command."""

INTRO = """Generative retrieval with Semantic IDs: a prompt in, legal SIDs and their items out.

\b
  grinf build-trie items.parquet          CSR SID trie from parquet
  grinf recall --input queries.parquet    offline batch recall, parquet in, parquet out
  grinf bench --sla 100ms                 prefill length x beam schedule: max req/s inside the SLA
"""

EPILOG = (
    "Anywhere: --json (one JSON document on stdout), --quiet, --debug. "
    "Settings: flag, then GRINF_* variables, then --config, then ./grinf.toml."
)


class Terminated(BaseException):
    """The process was asked to end by SIGTERM; unwinds like Ctrl-C, so that temporary files are removed."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """A command line, with the flags that may stand anywhere taken out."""

    arguments: list[str]
    command: str
    """Name of the command; empty where the line has none that exists."""
    as_json: bool
    quiet: bool
    debug: bool

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "Invocation":
        """Split `argv`; everything after `--` is left as it is."""
        end = list(argv).index("--") if "--" in argv else len(argv)
        ours = argv[:end]
        arguments = [word for word in ours if word not in ("--json", "--quiet", "-q", "--debug")]
        arguments += argv[end:]
        return cls(
            arguments=arguments,
            command=_first_command(arguments),
            as_json="--json" in ours,
            quiet="--quiet" in ours or "-q" in ours,
            debug="--debug" in ours or os.environ.get("GRINF_DEBUG") == "1",
        )


def _first_command(words: Sequence[str]) -> str:
    first = next((word for word in words if not word.startswith("-")), "")
    return first if first in COMMANDS else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code of the process."""
    call = Invocation.parse(sys.argv[1:] if argv is None else argv)
    console = Console(as_json=call.as_json, quiet=call.quiet)
    sys.excepthook = lambda kind, error, trace: _fail(error, call, console)  # For what nobody expected.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal without UTF-8 shows '?' and goes on.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        answer = _run(call, console)
        return _emit(answer, console) if isinstance(answer, CommandResult) else answer
    except (GrinfError, OSError, MemoryError, KeyboardInterrupt, Terminated) as error:
        return _fail(error, call, console)


def _emit(result: CommandResult, console: Console) -> ExitCode:
    try:
        console.emit(result)
        sys.stdout.flush()
    except OSError as error:
        silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # That one means that `grinf ... | head` has read enough.
            raise
    return result.exit_code


def _run(call: Invocation, console: Console) -> CommandResult | int:
    """Give typer the command line; its own refusals become `UsageError`."""
    app = _build_app(_command_to_complete() or call.command)
    try:
        answer: Any = typer.main.get_command(app).main(
            call.arguments or ["--help"], prog_name="grinf", standalone_mode=False, obj=console
        )
    except typer.TyperException as error:
        raise _refused(error, call.command) from error
    if answer == ExitCode.INTERRUPTED:  # How typer answers Ctrl-C.
        raise KeyboardInterrupt
    return answer if isinstance(answer, CommandResult | int) else ExitCode.OK


def _refused(error: typer.TyperException, command: str) -> UsageError:
    """Tell what typer refuses about a command line."""
    near: Sequence[str] = getattr(error, "possibilities", None) or ()
    if near:
        return UsageError(error.message, fix=f"did you mean {near[0]}?")
    help_command = f"grinf {command} --help" if command else "grinf --help"
    return UsageError(error.format_message(), fix=f"`{help_command}` shows what it takes")


def _build_app(chosen: str) -> typer.Typer:
    """Import the chosen command; the others stand in the help text by their name and one line."""
    app = typer.Typer(
        help=INTRO,
        epilog=EPILOG,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        rich_markup_mode=None,  # Plain help: half the start-up time, and it survives a pipe.
    )
    app.callback()(_show_global_flags)
    for name, text in COMMANDS.items():
        command = load_command(name) if name == chosen else _not_loaded
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=text, epilog=EPILOG, no_args_is_help=False)
        else:
            app.command(name, cls=PanelCommand, short_help=text, epilog=EPILOG)(command)
    return app


def load_command(name: str) -> Any:
    """Import a command: a function, or a `typer.Typer`."""
    return import_module(f"grinf.cli.{name.replace('-', '_')}").command


class PanelCommand(TyperCommand):
    """A command whose plain help text lists its options by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, a section for each panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None)
            title = panel or ("Arguments" if parameter.param_type_name == "argument" else "Options")
            if record := parameter.get_help_record(ctx):
                panels.setdefault(title, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _show_global_flags(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result and errors only.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Declare the flags of `Invocation` for the help text; they are taken out before typer sees them."""


def _not_loaded() -> NoReturn:
    raise AssertionError("only the chosen command is loaded, and only that one can run")


def _command_to_complete() -> str:
    """Name of the command on the line that the shell asks to complete, if it asks."""
    if "_GRINF_COMPLETE" not in os.environ:
        return ""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return _first_command(line.split()[1:])


def _fail(error: BaseException, call: Invocation, console: Console) -> ExitCode:
    """Report a failure."""
    if call.debug:
        traceback.print_exception(error)
    told, exit_code = explain(error)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    console.fail(call.command or "grinf", told, exit_code)  # to its end, however often Ctrl-C is pressed
    for number, handler in before.items():
        signal.signal(number, handler)
    return exit_code


def explain(error: BaseException) -> tuple[GrinfError, ExitCode]:
    """Tell a failure as what / why / fix, with the exit code that it means."""
    match error:
        case GrinfError():
            return error, error.exit_code
        case KeyboardInterrupt():
            return GrinfError("interrupted"), ExitCode.INTERRUPTED
        case Terminated():
            return GrinfError("terminated"), ExitCode.TERMINATED
        case MemoryError():
            fix = "use smaller batches, or a machine with more memory"
            return EnvironmentFault("out of memory", str(error), fix), ExitCode.ENVIRONMENT
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            fix = "free some space and run the same command again"
            return StorageError(f"no space left for {_place(error)}", error.strerror or "", fix), ExitCode.IO
        case OSError():
            return StorageError(f"cannot use {_place(error)}", error.strerror or str(error)), ExitCode.IO
        case _:
            what = f"unexpected error: {type(error).__name__}: {error}"
            told = GrinfError(what, "this is a fault in grinf", "run again with --debug to see where")
            return told, ExitCode.UNEXPECTED


def _place(error: OSError) -> str:
    return str(error.filename) if error.filename else "the output"


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
