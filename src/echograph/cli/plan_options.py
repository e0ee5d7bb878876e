"""A plan's fields as options of a command, and as keys of a plan file."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from echograph.cli.plan import Plan, option_name
from echograph.errors import InputError, UnknownNameError, UsageError

MAX_BYTES = 64 * 1024


def with_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that takes `plan` one option for each of its fields, and `--plan FILE` for all of them."""
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    names = [f.name for f in fields(Plan)]

    def run(*, plan_file: Path | None, **values: Any) -> None:
        asked = {name: value for name in names if (value := values.pop(name)) is not None}
        command(plan=Plan(**{**(read_plan(plan_file) if plan_file else {}), **asked}), **values)

    file = Annotated[
        Path | None, typer.Option("--plan", help="TOML file of these options; those given here count more.")
    ]
    parameters = [
        *(p for p in own if p.default is inspect.Parameter.empty and p.name != "plan"),
        *_options(),
        inspect.Parameter("plan_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file),
        *(p for p in own if p.default is not inspect.Parameter.empty),
    ]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in keyword}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _options() -> list[inspect.Parameter]:
    """No option has a default of its own: only so can a file say what the command line does not."""
    found = []
    for f, kind in zip(fields(Plan), map(_kind, get_type_hints(Plan).values()), strict=True):
        name = option_name(f.name)
        text = f"{f.metadata['help']} [default: {f.metadata['shown'] or _shown(f.default)}]"
        names = f"{name}/--no-{name[2:]}" if kind is bool else name
        option: Any = Annotated[kind | None, typer.Option(names, help=text, show_default=False)]
        found.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option))
    return found


def _shown(default: Any) -> str:
    return {True: "yes", False: "no"}.get(default, str(default)) if isinstance(default, bool) else str(default)


def _kind(hint: Any) -> Any:
    """The type of a field, without None."""
    if isinstance(hint, UnionType):
        (hint,) = (h for h in get_args(hint) if h is not type(None))
    return hint


def read_plan(path: Path) -> dict[str, Any]:
    """The fields that a plan file gives; keys are the options' names without dashes in front.

    Raises:
        InputError: the file cannot be read, or is no TOML.
        UnknownNameError: a key is no option.
        UsageError: a value is of another type than the option's.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InputError(f"plan file {path}: is over {MAX_BYTES // 1024} KiB, no plan is that long")
        found = tomllib.loads(data.decode())
    except OSError as error:
        raise InputError(f"plan file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise InputError(f"plan file {path}: is no TOML: {error}") from None
    hints = {name: _kind(hint) for name, hint in get_type_hints(Plan).items()}
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise UnknownNameError(f"option in plan file {path}:", key, [n.replace("_", "-") for n in hints])
        values[name] = _value(path, key, value, hints[name])
    return values


def _value(path: Path, key: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if key == "recompute" and type(value) is int:
        return str(value)
    if key.replace("-", "_") == "stage_layers" and isinstance(value, list):
        return ",".join(map(str, value))
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise UsageError(f"plan file {path}: {key} is {str(value)[:40]!r}: give {words[kind]}")
    return value
