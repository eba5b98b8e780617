"""The errors and warnings a caller is expected to meet."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import FrameType


class InputError(ValueError):
    """A value given by the user can't be used; one sentence says which, and what is accepted."""


def reason(error: BaseException) -> str:
    """What somebody else's code raised, on one line."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


class NotFiniteError(InputError):
    """The loss or the gradient of a sample is NaN or infinite."""


class DivergedError(InputError):
    """Pruning or training has led to losses, gradients or weights that are not finite."""


class PruningWarning(UserWarning):
    """Something about the model, its data or the settings that the user should know of."""


def warn(message: str) -> None:
    """Warn at the line that called the package, however deep inside it is noticed."""
    package = Path(__file__).parent
    frame: FrameType | None = sys._getframe()
    depth = outermost = 0
    while frame is not None:
        depth += 1
        file = frame.f_code.co_filename
        # A function may be decorated with a context manager, which is a frame of contextlib.
        decorates = outermost == depth - 1 and file == contextlib.__file__
        if package in Path(file).parents or decorates:
            outermost = depth
        frame = frame.f_back
    warnings.warn(message, PruningWarning, stacklevel=outermost + 1)
