"""How a setting is declared: the values that it takes, how they are spelled, and how help shows it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from grinf.config import parse
from grinf.errors import UsageError


def refuse(what: str, why: str = "", fix: str = "") -> PydanticCustomError:
    """Make an error that pydantic carries to `load.resolve`, which adds where the value came from."""
    return PydanticCustomError("grinf", "{what}", {"what": what, "why": why, "fix": fix})


def _reads(read: Callable[[Any], object]) -> BeforeValidator:
    """Let `read` see a value before pydantic, which is strict, does."""

    def validate(value: object) -> object:
        try:
            return read(value)
        except UsageError as error:
            raise refuse(error.what, error.why, error.fix) from error

    return BeforeValidator(validate)


def _text(parser: Callable[[str], object]) -> BeforeValidator:
    """Read text by `parser`, and leave any other value as it is."""
    return _reads(lambda value: parser(value) if isinstance(value, str) else value)


def _joined(value: object) -> object:
    """Turn numbers and arrays of a TOML file into the text that a flag would give: [100, "200:400:100"]."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or ()
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _path(text: str) -> Path:
    if not text:
        raise UsageError("the path is empty")
    if "\0" in text:
        raise UsageError(f"{text!r} is no path", "it has a zero byte in it")
    return Path(text).expanduser()


def _paths(value: object) -> object:
    """Read one path or an array of them; a comma is a legal character of a path."""
    many = [value] if isinstance(value, str | Path) else value
    if not isinstance(many, list | tuple) or not many:
        return value
    return tuple(_path(one) if isinstance(one, str) else one for one in many)


def _one_or_more(value: object) -> object:
    """Read one text or an array of them; commas belong to the text."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _spell_beams_list(schedules: tuple[tuple[int, ...], ...]) -> str:
    return ",".join(map(parse.format_beams, schedules))


def _spell_slas(slas: tuple[parse.Sla, ...]) -> str:
    return ",".join(map(str, slas))


def _spell_scores(scores: tuple[parse.Score, ...]) -> str:
    return ",".join(map(str, scores))


def _spelled(spell: Callable[..., str]) -> PlainSerializer:
    return PlainSerializer(spell, when_used="json")


Joined = _reads(_joined)
Switch = Annotated[bool, _text(parse.parse_bool)]
Int = Annotated[int, _text(parse.parse_count), Field(ge=0)]
Count = Annotated[int, _text(parse.parse_count), Field(ge=1)]
Number = Annotated[float, _text(parse.parse_float), Field(strict=False, allow_inf_nan=False)]
Bytes = Annotated[int, _text(parse.parse_bytes), Field(ge=1)]
DurationNs = Annotated[int, _text(parse.parse_duration_ns), Joined, _spelled(parse.format_duration)]
Column = Annotated[str, Field(min_length=1)]
File = Annotated[Path, _text(_path)]
Files = Annotated[tuple[Path, ...], _reads(_paths)]
Names = Annotated[tuple[str, ...], _text(parse.parse_names), Joined]
Ints = Annotated[tuple[int, ...], _text(parse.parse_ints), Joined]
Range = Annotated[tuple[int, ...], _text(parse.parse_range), Joined]
Beams = Annotated[tuple[int, ...], _text(parse.parse_beams), Joined, _spelled(parse.format_beams)]
BeamsList = Annotated[
    tuple[tuple[int, ...], ...], _text(parse.parse_beams_list), Joined, _spelled(_spell_beams_list)
]
Rejects = Annotated[parse.Quota, _text(parse.parse_quota), Joined, _spelled(str)]
ScoreMode = Annotated[parse.Score, _text(parse.parse_score), _spelled(str)]
Scores = Annotated[tuple[parse.Score, ...], _text(parse.parse_scores), Joined, _spelled(_spell_scores)]
Specs = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
Slas = Annotated[tuple[parse.Sla, ...], _text(parse.parse_slas), Joined, _spelled(_spell_slas)]
Device = Annotated[str, _text(parse.parse_device), Joined]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Presentation:
    """How the help text of a command shows a field.

    Attributes:
        default: The default in words; empty: none is shown.
        positional: An argument without a flag.
        many: May be given more than once.
        switch: A flag without a value; with `negatable`, also in its `--no-` form.
    """

    help: str
    metavar: str
    panel: str
    default: str
    positional: bool
    many: bool
    switch: bool
    negatable: bool
    short: str


def setting(
    default: Any,
    help: str,
    metavar: str = "",
    *,
    panel: str = "Options",
    shown: str = "",
    short: str = "",
    positional: bool = False,
    many: bool = False,
) -> Any:
    """Declare a field; `default` is `...` where it must be given, `shown` tells a default that depends."""
    extra: dict[str, Any] = {"metavar": metavar, "panel": panel, "shown": shown, "short": short}
    return Field(
        default, description=help, json_schema_extra=extra | {"positional": positional, "many": many}
    )


def presentation(model: type[BaseModel]) -> dict[str, Presentation]:
    """Say for each field of a settings model how the help text shows it."""
    return {name: _presentation(model, name) for name in model.model_fields}


def _presentation(model: type[BaseModel], name: str) -> Presentation:
    field = model.model_fields[name]
    extra: Any = field.json_schema_extra
    parts = (field.annotation, *get_args(field.annotation))
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
    is_switch = field.annotation is bool
    return Presentation(
        help=field.description or "",
        metavar=extra["metavar"] or "|".join(choices),
        panel=extra["panel"],
        default=extra["shown"] or ("" if is_switch else _spelled_default(model, name)),
        positional=extra["positional"],
        many=extra["many"],
        switch=is_switch,
        negatable=is_switch and field.default is True,
        short=extra["short"],
    )


def _spelled_default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required() or field.default in (None, ()):
        return ""
    return str(model.model_construct(**{name: field.default}).model_dump(mode="json", include={name})[name])
