"""The line of a user's script at which something happened, and what to tell the user about it."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARIES = tuple(str(Path(path).resolve()) for path in sysconfig.get_paths().values())
_OURS = str(Path(__file__).resolve().parents[1])
_NO_CUDA = (
    "Torch not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "_cuda_",
    "NCCL built in",
)


def own_line(frames: Sequence[traceback.FrameSummary], script: Path) -> str:
    """``train.py:12: x = model(batch)``: the innermost line that is the user's own, "" if there is none.

    Args:
        frames: Outermost first.
        script: Its folder holds what is the user's own.
    """
    home = script.resolve().parent
    inside = [frame for frame in frames if _is_below(Path(frame.filename), home)]
    outside = [frame for frame in frames if not Path(frame.filename).name.startswith("<") and _is_users(frame.filename)]
    for frame in (*reversed(inside), *reversed(outside)):
        path = Path(frame.filename)
        name = path.relative_to(home) if path.is_relative_to(home) else path
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        return f"{name}:{frame.lineno}: {source}"
    return ""


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder) and _is_users(str(path))


def _is_users(filename: str) -> bool:
    path = str(Path(filename).resolve())
    return Path(path).exists() and not path.startswith((*_LIBRARIES, _OURS))


def line_of(error: BaseException, script: Path) -> str:
    """The user's own line that raised an error."""
    return own_line(traceback.extract_tb(error.__traceback__), script)


def line_of_frame(frame: FrameType | None, script: Path) -> str:
    """The user's own line that a frame is at."""
    return own_line(traceback.extract_stack(frame), script) if frame is not None else ""


def line_of_thread(thread: int, script: Path) -> str:
    """The user's own line that a thread is at now."""
    return line_of_frame(sys._current_frames().get(thread), script)


def told(error: BaseException, script: Path) -> str:
    """What to say of an error that ended a script, in one line."""
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


def print_own_traceback(error: BaseException, below: TracebackType | None = None) -> None:
    """Print the traceback of a script without the frames of its wrapper."""
    frames = traceback.extract_tb(below or error.__traceback__)
    shown = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen"))]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    sys.stderr.write("".join([*lines, *traceback.format_exception_only(error)]))
    sys.stderr.flush()
