"""Says in one line what a user's code raised, and where."""

from __future__ import annotations

import traceback
from pathlib import Path

_LONGEST_REASON = 200


def reason(error: BaseException) -> str:
    """Type and first line of an exception."""
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first_line[:_LONGEST_REASON]}"


def user_line(error: BaseException) -> str:
    """`name.py:line` of the innermost frame that is neither PyTorch's nor ours; "" if there is none."""
    import torch

    libraries = [Path(torch.__file__).resolve().parent, Path(__file__).resolve().parent]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.suffix == ".py" and not any(path.is_relative_to(library) for library in libraries):
            return f"{path.name}:{frame.lineno}"
    return ""
