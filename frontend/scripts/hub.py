"""What a script writes to the Hugging Face hub is passed over: a capture writes nothing outside.

Repositories that a script makes there, commits and uploads are answered as the hub answers, so that it goes on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from echograph.frontend.scripts.adapter import once_imported, replaced
from echograph.frontend.scripts.values import NoteTaker, line_of_script

_PLACE = "https://huggingface.co"
_COMMITS = ("create_commit", "upload_file", "upload_folder", "delete_file", "delete_files", "delete_folder")
_WITHOUT_ANSWER = (
    "upload_large_folder", "preupload_lfs_files", "create_branch", "create_tag", "delete_branch", "delete_tag",
    "delete_repo", "move_repo", "super_squash_history", "update_repo_settings", "update_repo_visibility",
)  # fmt: skip
_USER = {"type": "user", "name": "user", "fullname": "user", "orgs": []}
_WRITTEN_BY = {
    "huggingface_hub._login": ("login", "notebook_login", "interpreter_login"),
    "datasets.arrow_dataset": ("Dataset.push_to_hub",),
    "datasets.dataset_dict": ("DatasetDict.push_to_hub", "IterableDatasetDict.push_to_hub"),
    "datasets.iterable_dataset": ("IterableDataset.push_to_hub",),
}
"""Module -> what else in it writes there, and is asked for no answer."""


@contextmanager
def installed(note: NoteTaker) -> Iterator[None]:
    """In the context, nothing is written to the hub.

    Args:
        note: is told which lines of the script would.
    """
    with ExitStack() as stack:
        stack.enter_context(once_imported("huggingface_hub.hf_api", partial(_of_its_interface, note)))
        for module, names in _WRITTEN_BY.items():
            stack.enter_context(once_imported(module, partial(_of_a_module, note, module, names)))
        yield


@contextmanager
def _of_its_interface(note: NoteTaker) -> Iterator[None]:
    package = importlib.import_module("huggingface_hub.hf_api")
    answers: dict[str, Callable[..., Any]] = dict.fromkeys(_COMMITS, partial(_commit, package))
    answers |= dict.fromkeys(_WITHOUT_ANSWER, _nothing)
    answers |= {"create_repo": partial(_repository, package), "whoami": lambda *_, **__: dict(_USER)}
    with ExitStack() as stack:
        for name in filter(partial(hasattr, package.HfApi), answers):
            # A function of the package is a method of its one object, which others have by name.
            method = getattr(package, name, None)
            stack.enter_context(replaced(package.HfApi, name, _passed_over(name, answers[name], note)))
            stack.enter_context(_handed_out(name, method, getattr(package.api, name)))
        yield


@contextmanager
def _of_a_module(note: NoteTaker, module: str, names: tuple[str, ...]) -> Iterator[None]:
    package = importlib.import_module(module)
    with ExitStack() as stack:
        for path in names:
            kind, _, name = path.rpartition(".")
            owner = getattr(package, kind, None) if kind else package
            if hasattr(owner, name):
                passed: Any = _passed_over(name, _nothing, note)
                passed = passed if kind else partial(passed, None)
                before = getattr(owner, name)
                stack.enter_context(replaced(owner, name, passed))
                if not kind:
                    stack.enter_context(_handed_out(name, before, passed))
        yield


@contextmanager
def _handed_out(name: str, old: Any, new: Any) -> Iterator[None]:
    """In the context, modules that have a function by its name have another one."""

    def give(old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if type(module) is ModuleType and old is not None and vars(module).get(name) is old:
                setattr(module, name, new)

    give(old, new)
    try:
        yield
    finally:
        give(new, old)


def _passed_over(name: str, answer: Callable[..., Any], note: NoteTaker) -> Callable[..., Any]:
    def call(asked: Any, *args: Any, **kwargs: Any) -> Any:
        del asked
        note(f"{line_of_script()} calls '{name}' of the Hugging Face hub: a capture writes nothing there")
        made = answer(*args, **kwargs)
        if not kwargs.get("run_as_future"):
            return made
        future: Future[Any] = Future()
        future.set_result(made)
        return future

    return call


def _nothing(*_: Any, **__: Any) -> None:
    """It has no answer."""


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = str(kwargs.get("repo_id", args[0] if args else "") or "repository")
    return name if "/" in name else f"{_USER['name']}/{name}"


def _repository(package: Any, *args: Any, **kwargs: Any) -> Any:
    return package.RepoUrl(f"{_PLACE}/{_named(args, kwargs)}")


def _commit(package: Any, *args: Any, **kwargs: Any) -> Any:
    url = f"{_PLACE}/{_named(args, kwargs)}/commit/{'0' * 40}"
    said = str(kwargs.get("commit_message") or "")
    return package.CommitInfo(commit_url=url, commit_message=said, commit_description="", oid="0" * 40)
