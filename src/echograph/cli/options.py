"""Options of commands: those that several share, and those that are the fields of a dataclass of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from echograph.errors import UsageError
from echograph.options import field_types, option_name
from echograph.workflow.plan import Plan, read_plan

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result as JSON.")]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Write a Chrome trace, for Perfetto.")]
GraphFiles = Annotated[list[Path], typer.Argument(help="A graph file written by echoc; several run side by side.")]
GraphFile = Annotated[Path, typer.Argument(help="A graph file written by echoc.")]
MODEL = typer.Option("--model", "-m", help="Zoo name, Hugging Face config folder or JSON, or file.py:function.")

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_FILE = Annotated[
    Path | None, typer.Option("--plan", help="TOML file of these options; those given here count more.")
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of the dataclasses that it takes; a plan can come from a file.

    A parameter of a dataclass's type gets one, made of what is given; one that is
    `Annotated[dict[str, Any], Dataclass]` gets only what is given, by the fields' names. An empty text is none: it
    is mostly a variable of a shell that is not set.
    """
    return _WithOptions(command)


class _WithOptions:
    """A command whose options are made when Typer asks for them: of all commands, one runs."""

    def __init__(self, command: Callable[..., None]) -> None:
        self.command = command
        self.__doc__, self.__name__ = command.__doc__, command.__name__

    def __call__(self, **values: Any) -> None:
        file = values.pop("plan_file", None)
        for name, group in self._groups.items():
            asked = {} if file is None or group is not Plan else read_plan(file)
            for f in fields(group):
                value = values.pop(f.name)
                if value == "" or (isinstance(value, list) and "" in value):
                    raise UsageError(f"{option_name(f.name)}: is empty: give a value, or leave it out")
                if value not in (None, (), []):
                    asked[f.name] = tuple(value) if isinstance(value, list) else value
            values[name] = group(**asked) if is_dataclass(self._hints[name]) else asked
        self.command(**values)

    @property
    def __signature__(self) -> inspect.Signature:
        made: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(self.command).parameters.items():
            group = self._groups.get(name)
            own = parameter.replace(annotation=self._hints[name], kind=_KEYWORD)
            made += [own] if group is None else _options(group)
            if group is Plan:
                made.append(inspect.Parameter("plan_file", _KEYWORD, default=None, annotation=_FILE))
        return inspect.Signature(made)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: parameter.annotation for name, parameter in self.__signature__.parameters.items()}

    @cached_property
    def _hints(self) -> dict[str, Any]:
        return get_type_hints(self.command, include_extras=True)

    @cached_property
    def _groups(self) -> dict[str, Any]:
        """The dataclasses whose fields are options, by the names of the command's parameters."""
        return {name: group for name, hint in self._hints.items() if (group := _group(hint)) is not None}


def _group(hint: Any) -> Any:
    """The dataclass whose fields are options, if a parameter has one."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[1]
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _options(group: Any) -> Iterator[inspect.Parameter]:
    """No option has a default of its own: only so can a file say what the command line does not."""
    types = field_types(group)
    for f in fields(group):
        name, kind = option_name(f.name), types[f.name]
        names = f"{name}/--no-{name[2:]}" if kind is bool else name
        short = [f"-{f.metadata['letter']}"] if f.metadata["letter"] else []
        several = get_origin(kind) is tuple
        default = "" if several else f.metadata["shown"] or _shown(f.default)
        text = f.metadata["help"] + (f" [default: {default}]" if default else "")
        option: Any = Annotated[
            (list[get_args(kind)[0]] if several else kind) | None,  # type: ignore[misc]
            typer.Option(names, *short, help=text, show_default=False, min=f.metadata["least"]),
        ]
        yield inspect.Parameter(f.name, _KEYWORD, default=None, annotation=option)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "" if default is None else str(default)
