"""A plan's fields as options of a command, and as keys of a plan file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from echograph.workflow.plan import Plan, kind_of, option_name, read_plan


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
    for f, kind in zip(fields(Plan), map(kind_of, get_type_hints(Plan).values()), strict=True):
        name = option_name(f.name)
        text = f"{f.metadata['help']} [default: {f.metadata['shown'] or _shown(f.default)}]"
        names = f"{name}/--no-{name[2:]}" if kind is bool else name
        option: Any = Annotated[kind | None, typer.Option(names, help=text, show_default=False)]
        found.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option))
    return found


def _shown(default: Any) -> str:
    return {True: "yes", False: "no"}.get(default, str(default)) if isinstance(default, bool) else str(default)
