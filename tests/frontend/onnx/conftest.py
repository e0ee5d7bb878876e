"""What the tests of the ONNX frontend share is `onnx_models`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("onnx")
pytest.importorskip("torch")
