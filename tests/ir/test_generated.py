"""The generated modules are what protoc makes of the .proto files now."""

from __future__ import annotations

import pytest


def test_the_generated_modules_are_fresh() -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, of the dev extra")
    from echograph.proto.generate import stale

    assert stale() == [], "run: python -m echograph.proto.generate"
