"""What users can correct, and the line of their own script at which something happens."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[1])  # its frames are not part of the script
_LIBRARIES = tuple(str(Path(path).resolve()) for path in sysconfig.get_paths().values())


class HarnessError(ValueError):
    """A plan that cannot be collected here; the message states the rule and the values."""


def own_line(frames: Sequence[traceback.FrameSummary], script: Path) -> str:
    """``train.py:12: x = model(batch)``: the innermost line of the user's script, "" if there is none.

    The outermost of ``frames`` comes first; the folder of ``script`` holds what is the user's own.
    """
    place, frame = _innermost(frames, script)
    if frame is None:
        return ""
    return f"{place}: {(frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()}"


def own_place(frames: Sequence[traceback.FrameSummary], script: Path) -> str:
    """``train.py:12``: like ``own_line``, without the text of the line."""
    return _innermost(frames, script)[0]


def _innermost(frames: Sequence[traceback.FrameSummary], script: Path) -> tuple[str, traceback.FrameSummary | None]:
    """The innermost frame in the script's folder, else outside of libraries; its place comes first."""
    home, found = script.resolve().parent, list[traceback.FrameSummary]()
    for frame in reversed(frames):
        path = Path(frame.filename).resolve()
        if not frame.filename.startswith("<") and path.exists() and not str(path).startswith((*_LIBRARIES, PACKAGE)):
            found.append(frame)
    found.sort(key=lambda frame: not Path(frame.filename).resolve().is_relative_to(home))
    if not found:
        return "", None
    path = Path(found[0].filename)
    return f"{path.relative_to(home) if path.is_relative_to(home) else path}:{found[0].lineno}", found[0]


def line_of(error: BaseException, script: Path) -> str:
    """The user's own line that raised an error."""
    return own_line(traceback.extract_tb(error.__traceback__), script)


def line_of_thread(thread: int, script: Path) -> str:
    """The user's own line that a thread is at now."""
    frame = sys._current_frames().get(thread)
    return own_line(traceback.extract_stack(frame), script) if frame is not None else ""


_NO_CUDA = (
    "Torch not compiled with CUDA", "No CUDA GPUs are available", "Found no NVIDIA driver", "_cuda_", "NCCL built in"
)  # fmt: skip


def error_text(error: BaseException, script: Path) -> str:
    """The message of an error that ended a script, in one line."""
    where = line_of(error, script)
    if isinstance(error, SyntaxError):
        where = f"{Path(error.filename or script).name}:{error.lineno}: {(error.text or '').strip()}"
    message = " ".join(str(error).split())
    if any(words in message for words in _NO_CUDA):
        return (
            f"the script must run on this machine's devices, but it asks for CUDA and there is none at {where}; "
            "choose the CPU and gloo in the script, or run it on a machine with a GPU"
        )
    return f"the script raised {type(error).__name__}: {message:.300}" + (f" at {where}" if where else "")


def print_own_traceback(error: BaseException) -> None:
    """Print the traceback of a script without the frames of its wrapper."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if not frame.filename.startswith((PACKAGE, "<frozen"))]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    sys.stderr.write("".join([*lines, *traceback.format_exception_only(error)]))
    sys.stderr.flush()
