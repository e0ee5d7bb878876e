"""What these tests share is `megatron_plans`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("torch", reason="needs the [torch] extra")
