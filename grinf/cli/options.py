"""One schema, every spelling: the flags of a command are the fields of its settings model."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from grinf.cli.render import CommandResult, Console
from grinf.config.fields import Presentation, presentation
from grinf.config.load import resolve
from grinf.config.settings import Settings

S = TypeVar("S", bound=Settings)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Settings file; wins over ./grinf.toml.", metavar="FILE")
]


def settings_command(
    model: type[S],
) -> Callable[[Callable[[S, Console], CommandResult]], Callable[..., CommandResult | None]]:
    """Turn a function of (settings, console) into a command whose flags are the fields of `model`.

    A flag that is not given leaves the setting to the environment and the files; the function sees resolved,
    checked settings only. As the callback of a group it runs where no sub-command is given.
    """

    def decorate(run: Callable[[S, Console], CommandResult]) -> Callable[..., CommandResult | None]:
        def command(ctx: typer.Context, config: Path | None, **flags: Any) -> CommandResult | None:
            if ctx.invoked_subcommand is not None:
                return None
            return run(resolve(model, flags, config), ctx.ensure_object(Console))

        # Click keeps the lines of a paragraph apart behind a backspace; raw docstrings spell it out.
        command.__doc__ = (run.__doc__ or "").replace("\\b", "\b")
        command.__name__ = run.__name__
        command.__dict__["__signature__"] = _signature(model)
        return command

    return decorate


def _signature(model: type[Settings]) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("ctx", keyword, annotation=typer.Context)]
    for name, shown in presentation(model).items():
        option = _annotation(name, shown)
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=option))
    parameters.append(inspect.Parameter("config", keyword, default=None, annotation=ConfigFile))
    return inspect.Signature(parameters)


def _annotation(name: str, shown: Presentation) -> Any:
    """Give typer the text of a value only: to parse it is the model's part, for flags and files alike."""
    default = f" [default: {shown.default}]" if shown.default else ""
    if shown.positional:
        argument = typer.Argument(help=shown.help + default, metavar=shown.metavar, show_default=False)
        return Annotated[list[str] | None if shown.many else str | None, argument]
    flag = "--" + name.replace("_", "-")
    spellings = [f"{flag}/--no-{flag[2:]}"] if shown.negatable else [flag]
    spellings += [shown.short] if shown.short else []
    metavar = None if shown.switch else shown.metavar
    option = typer.Option(
        *spellings,
        help=shown.help + default,
        metavar=metavar,
        show_default=False,
        rich_help_panel=shown.panel,
    )
    if shown.switch:
        return Annotated[bool | None, option]
    return Annotated[list[str] | None if shown.many else str | None, option]
