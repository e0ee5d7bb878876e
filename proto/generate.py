"""Writes the generated modules beside the .proto files (needs the dev extra).

python -m echograph.proto.generate [--check]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

SOURCES = ("workload", "profile", "chakra", "xplane")
HERE = Path(__file__).resolve().parent


def generate(target: Path) -> list[Path]:
    """Runs protoc on every source; returns the generated files under `target`."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    root = HERE.parent / "src"
    names = [f"echograph/proto/{name}.proto" for name in SOURCES]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")  # need not be on the PATH
    stubs = [f"--plugin={plugin}"] if plugin.exists() else []
    status = protoc.main(
        ["protoc", f"-I{root}", *stubs, f"--python_out={target}", f"--mypy_out=quiet:{target}", *names]
    )
    if status != 0:
        raise SystemExit(status)
    folder = target / "echograph" / "proto"
    return sorted(p for p in folder.iterdir() if "_pb2." in p.name)


def stale() -> list[str]:
    """Names of generated files that differ from what protoc makes of the sources now."""
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(Path(scratch))
        return [
            p.name for p in made if not (HERE / p.name).exists() or (HERE / p.name).read_bytes() != p.read_bytes()
        ]


def main() -> None:
    """Regenerates in place, or with --check only says what is stale."""
    if "--check" in sys.argv[1:]:
        old = stale()
        raise SystemExit(f"stale: {', '.join(old)}; run python -m echograph.proto.generate" if old else 0)
    generate(HERE.parent / "src")


if __name__ == "__main__":
    main()
