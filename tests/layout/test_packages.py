"""What is built and installed is what stands in the folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs hatchling, of the dev extra")

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = ROOT / "src" / "echograph"
OFFLINE = re.compile(r"NewConnectionError|ConnectTimeoutError|NameResolutionError|ReadTimeoutError")

pytestmark = pytest.mark.slow


def build(folder: Path, out: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    """Runs the project's build backend in a folder."""
    asked = [word for target in targets for word in ("-t", target)]
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", out, *asked],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def content(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    done = build(ROOT, out, "sdist", "wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def unpacked(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist as a folder."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def test_a_wheel_holds_the_files_of_the_folders(built: dict[str, Path]) -> None:
    files = [
        Path(folder, name)
        for folder, _, names in os.walk(NAMESPACE, followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    ]
    wanted = {f"echograph/{file.relative_to(NAMESPACE).as_posix()}": file.read_bytes() for file in files}
    packed = {name: data for name, data in content(built["wheel"]).items() if name.startswith("echograph/")}
    assert packed.keys() == wanted.keys()
    assert packed == wanted
    assert {".py", ".typed", ".proto", ".json", ".toml", ".css", ".js"} <= {Path(name).suffix for name in packed}


def test_the_wheel_of_an_sdist_is_that_of_the_checkout(
    built: dict[str, Path], unpacked: Path, tmp_path: Path
) -> None:
    done = build(unpacked, tmp_path, "wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    assert content(tmp_path / built["wheel"].name) == content(built["wheel"])


def test_an_editable_installation_points_at_the_sources(tmp_path: Path) -> None:
    script = f"import hatchling.build as b; print(b.build_editable({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = {name: data for name, data in content(wheel).items() if ".dist-info/" not in name}
    assert [data.decode().strip() for data in files.values()] == [str(ROOT / "src")]


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_a_checkout_without_links_builds_nothing_and_says_why(target: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", symlinks=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    links = [path for path in (checkout / "src" / "echograph").iterdir() if path.is_symlink()]
    for link in links:
        # What Git writes in place of a link where core.symlinks is false.
        target_of = str(link.readlink())
        link.unlink()
        link.write_text(target_of)
    done = build(checkout, tmp_path / "out", target)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line and line != f"[{target}]"]
    assert done.returncode == 1
    assert len(links) == 6
    assert len(said) == 1
    assert said[0].startswith("echograph: cannot build: frontend, ir, models, profiler, proto, simulator")
    assert "core.symlinks=true" in said[0]
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_an_empty_environment_simulates_what_was_installed(
    kind: str, built: dict[str, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    programs = tmp_path / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    installed = subprocess.run(
        [*pip, "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", built[kind]],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if installed.returncode and OFFLINE.search(installed.stdout + installed.stderr):
        pytest.skip("the package registry cannot be reached")
    assert installed.returncode == 0, installed.stdout + installed.stderr

    def run(*words: object) -> str:
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    listed = run(programs / "python", "-m", "echograph").splitlines()
    assert [line.split()[0] for line in listed] == ["echograph", "echoc", "echosim", "echoprof"]
    assert "bert-base-uncased" in run(programs / "echoc", "models")
    shutil.copy(ROOT / "examples" / "gpt2.pb", tmp_path)
    predicted = run(
        programs / "echosim", "run", "gpt2.pb", "--gpus", "1024", "--ranks", "all", "--html", "page.html"
    )
    assert "step time" in predicted
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!")
    without = run(programs / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    assert without.strip() == "None"
