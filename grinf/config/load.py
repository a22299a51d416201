"""Where a setting comes from, the first that has it: flag, GRINF_*, --config FILE, ./grinf.toml, default."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from grinf.config.fields import presentation
from grinf.config.parse import unknown
from grinf.config.settings import MODELS, SWEEP_AXES, Settings
from grinf.errors import UsageError

S = TypeVar("S", bound=Settings)

LOCAL_FILE = Path("grinf.toml")
SWEEP = "sweep"


@dataclass(frozen=True, slots=True)
class Found:
    """A raw value and where it was found."""

    value: Any
    origin: str


def resolve(model: type[S], flags: Mapping[str, Any], config: Path | None = None) -> S:
    """Collect the settings of a command from every source, and check them.

    Args:
        model: Settings of the command.
        flags: Values by field name; None and empty lists mean "not given".
        config: File of `--config`; None: the one of GRINF_CONFIG, if set.

    Raises:
        UsageError: A file that is missing or no TOML, an unknown key, or a value that is refused.
    """
    found: dict[str, Found] = {}
    if LOCAL_FILE.exists():
        found |= read_file(LOCAL_FILE, model)
    if chosen := config or _from_env("config"):
        found |= read_file(Path(chosen), model)
    for name in model.model_fields:
        if value := _from_env(name):
            found[name] = Found(value, f"GRINF_{name.upper()}")
    for name, value in flags.items():
        if value is not None and value != []:
            found[name] = Found(value, "--" + name.replace("_", "-"))
    return _check(model, found)


def read_file(path: Path, model: type[Settings]) -> dict[str, Found]:
    """Read what a file says about one command: shared keys, then the command's table, then `[sweep]`.

    Raises:
        UsageError: The file is missing or no TOML, or has a key that no command knows.
    """
    document = _toml(path)
    command = next(name for name, other in MODELS.items() if other is model)
    shared = {key: value for key, value in document.items() if not isinstance(value, dict)}
    tables: dict[str, dict[str, Any]] = {
        key: value for key, value in document.items() if isinstance(value, dict)
    }
    keys: dict[str, Sequence[str]] = {name: list(other.model_fields) for name, other in MODELS.items()}
    keys[SWEEP] = SWEEP_AXES
    everywhere = list(dict.fromkeys(key for known in keys.values() for key in known))
    for key in shared:
        _known(path, "key", key, everywhere)
    for table, content in tables.items():
        _known(path, "table", table, list(keys))
        for key in content:
            _known(path, f"[{table}] key", key, keys[table])
    found = {
        key: Found(value, f"{path}: {key}") for key, value in shared.items() if key in model.model_fields
    }
    for table in (command, SWEEP) if command == "bench" else (command,):
        found |= {
            key: Found(value, f"{path}: [{table}] {key}") for key, value in tables.get(table, {}).items()
        }
    return found


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}", error.strerror or str(error), "check --config or GRINF_CONFIG"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a TOML file", str(error)) from error


def _known(path: Path, kind: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        error = unknown(kind, given, known)
        raise UsageError(
            f"{path}: {error.what}", fix=error.fix or "`grinf COMMAND --help` lists the settings"
        )


def _check(model: type[S], found: Mapping[str, Found]) -> S:
    for name in found:
        if name not in model.model_fields:
            raise unknown("setting", name, list(model.model_fields))
    try:
        settings = model.model_validate({name: one.value for name, one in found.items()})
    except ValidationError as error:
        raise _told(error, model, found) from error
    for name in model.model_fields:
        settings.origin[name] = found[name].origin if name in found else "default"
    return settings


def _told(error: ValidationError, model: type[Settings], found: Mapping[str, Found]) -> UsageError:
    """Tell the first thing that pydantic refused, with the place that the value came from."""
    refused = next(one for one in error.errors() if one["type"] != "none_required")
    context: dict[str, Any] = refused.get("ctx", {})
    name = str(refused["loc"][0]) if refused["loc"] else ""
    if refused["type"] == "missing":
        shown = presentation(model)[name]
        written = shown.metavar if shown.positional else f"--{name.replace('_', '-')} {shown.metavar}"
        return UsageError(
            f"no {name} given", fix=f"add {written} to the command, or `{name} = ...` to grinf.toml"
        )
    if refused["type"] == "grinf":
        what, why, fix = context["what"], context["why"], context["fix"]
    elif refused["type"] == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        choice = unknown("value", str(refused["input"]), choices)
        what, why, fix = choice.what, "", choice.fix
    else:
        what, why, fix = (
            f"{refused['input']!r} is refused",
            refused["msg"].replace("Input should", "it should"),
            "",
        )
    origin = found[name].origin if name in found else ""
    return UsageError(f"{origin}: {what}" if origin else what, why, fix)


def _from_env(name: str) -> str | None:
    return os.environ.get(f"GRINF_{name.upper()}") or None
