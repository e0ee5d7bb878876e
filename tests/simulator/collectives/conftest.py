from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def refit() -> ModuleType:
    """The program that fits the shipped fabrics; it holds which rows make which."""
    spec = importlib.util.spec_from_file_location("refit", Path(__file__).with_name("refit.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses with postponed annotations look their module up by name.
    sys.modules["refit"] = module
    spec.loader.exec_module(module)
    return module
