"""Which steps are meant: arguments before variables, ours before ByteProfile's, and what is no window."""

from __future__ import annotations

from pathlib import Path

import pytest

from echograph.errors import UsageError
from echograph.profiler.record.recorder import Window, choose_window

OURS = {"ECHOGRAPH_RECORD_DIR": "ours", "ECHOGRAPH_RECORD_START_STEP": "5", "ECHOGRAPH_RECORD_END_STEP": "7"}
BYTEPS = {
    "BYTEPS_TRACE_ON": "1",
    "BYTEPS_TRACE_DIR": "byteps",
    "BYTEPS_TRACE_START_STEP": "10",
    "BYTEPS_TRACE_END_STEP": "20",
}


def test_who_says_the_steps() -> None:
    def chosen(*given: object, **environment: str) -> tuple[str, int, int]:
        window = choose_window(*given, environment=environment)  # type: ignore[arg-type]
        return str(window.folder), window.start, window.end

    assert chosen() == ("recording", 10, 13)
    assert chosen(**BYTEPS) == ("byteps", 10, 20)
    assert chosen(**BYTEPS | {"BYTEPS_TRACE_ON": "0"}) == ("recording", 10, 13)
    assert chosen(**BYTEPS, **OURS) == ("ours", 5, 7)
    assert chosen(Path("given"), 1, 2, **OURS) == ("given", 1, 2)
    assert chosen(None, 3, **OURS) == ("ours", 3, 7)
    assert chosen(None, 40) == ("recording", 40, 43)
    assert chosen(None, None, 4) == ("recording", 3, 4)


def test_a_window_says_itself_to_another_process() -> None:
    window = Window(folder=Path("here"), start=2, end=9)
    other = choose_window(environment=window.environment())
    assert (other.folder, other.start, other.end, other.shapes) == (Path("here").absolute(), 2, 9, True)
    window = Window(folder=Path("here"), start=2, end=9, shapes=False)
    assert not choose_window(environment=window.environment()).shapes


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [(0, 3, "give 1 or more"), (5, 5, "more than the start step, 5"), (5, 2, "end step 2")],
)
def test_what_is_no_window_says_so(start: int, end: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Window(folder=Path("x"), start=start, end=end)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="BYTEPS_TRACE_END_STEP: 'soon' is no number"):
        choose_window(environment=BYTEPS | {"BYTEPS_TRACE_END_STEP": "soon"})
