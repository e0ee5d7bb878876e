"""What the repository of a script asks of packages, where another version is installed than it asks for."""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

_LEVELS = 6
_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?\s*((?:[=<>!~]=?=?\s*[\w.*+-]+\s*,?\s*)+)"
)
_BOUND = re.compile(r"(===?|<=?|>=?|~=|!=)\s*(\d[\w.*+-]*)")


def unmet(script: Path, package: str = "") -> str:
    """What is asked of a package and not met, as `requirements.txt asks for torch==2.0.0, and 2.13.0 is here`.

    Args:
        script: its folder and those above it, up to that of its repository, are looked through.
        package: of which one distribution; "": of any, PyTorch's before others.

    Returns:
        A clause of a message; "" where nothing is asked, or all of it is met.
    """
    found: dict[str, str] = {}
    for file, asked in _files(script):
        for name, wanted in asked:
            key = name.lower().replace("_", "-")
            with suppress(PackageNotFoundError):
                here = version(name)
                if not _meets(here, wanted):
                    found.setdefault(key, f"{file} asks for {_shown(name, wanted)}, and {here} is here")
    wanted_name = package.lower().replace("_", "-")
    if wanted_name:
        return found.get(wanted_name, "")
    return found.get("torch") or next(iter(found.values()), "")


def installed(package: str) -> str:
    """What is installed that a package is imported from, as `ultralytics-thop 2.0.17`; "": none that is known.

    A distribution of the package's own name comes before others that have it.
    """
    for name in (package, *packages_distributions().get(package, ())):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""


def asked(script: Path, package: str) -> str:
    """What is asked of a package that is not there, as `requirements.txt asks for numpy==1.13.3`; "": nothing."""
    for file, wanted in _files(script):
        for name, bounds in wanted:
            if name.lower().replace("_", "-") == package.lower().replace("_", "-"):
                return f"{file} asks for {_shown(name, bounds)}"
    return ""


def python(file: Path) -> str:
    """What the project of a file asks of Python and is not met, as a clause of a message; "": nothing."""
    for folder in file.resolve().parents[:_LEVELS]:
        project = folder / "pyproject.toml"
        if project.is_file():
            with suppress(tomllib.TOMLDecodeError, UnicodeDecodeError):
                wanted = str(tomllib.loads(project.read_text()).get("project", {}).get("requires-python", ""))
                here = platform.python_version()
                return (
                    "" if _meets(here, wanted) else f"{project.name} asks for Python {wanted}, and {here} is here"
                )
    return ""


def _shown(name: str, bounds: str) -> str:
    return f"{name}{bounds.replace(' ', '').rstrip(',')}"


def _files(script: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Files of requirements, the nearest first, and the packages and bounds that each names."""
    for folder in [script.resolve().parent, *script.resolve().parents][1 : _LEVELS + 1]:
        for file in sorted(folder.glob("requirements*.txt")) + sorted(folder.glob("requirements/*.txt")):
            yield file.name, _parsed(file.read_text(errors="replace").splitlines())
        project = folder / "pyproject.toml"
        if project.is_file():
            with suppress(tomllib.TOMLDecodeError, UnicodeDecodeError):
                asked = tomllib.loads(project.read_text()).get("project", {}).get("dependencies", ())
                yield project.name, _parsed(asked)
        if (folder / ".git").exists():
            return


def _parsed(lines: list[str]) -> list[tuple[str, str]]:
    found = (_REQUIREMENT.match(line.partition("#")[0].partition(";")[0]) for line in lines)
    return [(match[1], match[2].strip()) for match in found if match]


def _meets(here: str, wanted: str) -> bool:
    """Whether a version is within all bounds; those that are written in other ways are taken to be met."""
    return all(_within(_numbers(here), bound, number) for bound, number in _BOUND.findall(wanted))


def _within(here: tuple[int, ...], bound: str, number: str) -> bool:
    there = _numbers(number)
    size = max(len(here), len(there))
    mine, other = (tuple(part) + (0,) * (size - len(part)) for part in (here, there))
    if bound in ("==", "===") and not number.endswith("*"):
        return mine == other
    if bound in ("==", "~="):
        return here[: len(there) - (bound == "~=")] == there[: len(there) - (bound == "~=")]
    return {"<": mine < other, "<=": mine <= other, ">": mine > other, ">=": mine >= other}.get(bound, True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-zA-Z+*]", text)[0])))
