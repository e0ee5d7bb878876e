"""Settings side by side, as a chart of bars in three dimensions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from echograph.errors import MissingExtraError, OutputError
from echograph.ir.files import write_whole
from echograph.profiler.byteprofile.statistics import Setting

FORMATS = ("png", "svg", "pdf")


def check_plot(path: Path) -> None:
    """Fails before any work where a chart cannot be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file's ending is none of `FORMATS`.
    """
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise OutputError(f"cannot write {path}: the ending is the format: give one of .{', .'.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "report", "a chart (--plot)")


def draw_settings(settings: Sequence[Setting], output: Path) -> None:
    """Draws the average of every operation (x, a colour a category) in every setting (y).

    Args:
        settings: one a row of bars.
        output: the picture.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    check_plot(output)
    import matplotlib
    from matplotlib.figure import Figure

    places: dict[tuple[str, str], int] = {}
    keys = {(category, name) for one in settings for category, names in one.averages.items() for name in names}
    for key in sorted(keys):
        places[key] = len(places)
    categories = sorted({category for category, _ in keys})
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.add_subplot(projection="3d")
    for row, one in enumerate(settings):
        for number, category in enumerate(categories):
            averages = one.averages.get(category, {})
            x = [places[category, name] for name in averages]
            first = all(category not in other.averages for other in settings[:row])
            label = category if averages and first else None
            axes.bar(x, list(averages.values()), zs=row, zdir="y", color=f"C{number % 10}", alpha=0.8, label=label)
    axes.set_xlabel("operation")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_zlabel("average, ms")
    several = len({one.worker for one in settings}) > 1
    names = [f"{Path(one.name).name} wk{one.worker}" if several else Path(one.name).name for one in settings]
    axes.set_yticks(range(len(settings)), names)
    figure.legend(loc="upper left")
    content = io.BytesIO()
    kind = output.suffix.removeprefix(".").lower()
    # No dates and no random identifiers: the same settings give the same bytes.
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context({"svg.hashsalt": "echograph"}):
        figure.savefig(content, format=kind, metadata=undated)
    write_whole(output, [content.getvalue()])
