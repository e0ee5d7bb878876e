"""Masks that say nothing are dropped, whenever the library that makes them is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the [torch] extra")

from echograph.frontend.pytorch.capture import plain_attention_masks

MASKING = "transformers.masking_utils"


@pytest.mark.torch
@pytest.mark.parametrize("when", ["before", "while"])
def test_masks_are_plain_whenever_they_are_imported(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script imports its libraries when it runs, which is after what is around it has begun."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "masking_utils.py").write_text(
        "def find_packed_sequence_indices(positions):\n    return positions\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    try:
        if when == "before":
            import_module(MASKING)
        with plain_attention_masks():
            assert import_module(MASKING).find_packed_sequence_indices(1) is None
        assert import_module(MASKING).find_packed_sequence_indices(1) == 1
        assert sys.meta_path == finders
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
