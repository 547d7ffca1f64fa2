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


def own_place(frames: Sequence[traceback.FrameSummary], script: Path, *, text: bool = False) -> str:
    """``train.py:12``, and with ``text`` ``: x = model(batch)``: the innermost line of the user's script, else "".

    The outermost of ``frames`` comes first; the folder of ``script`` holds what is the user's own, else all that is
    outside of libraries.
    """
    home = script.resolve().parent
    pairs = [(frame, Path(frame.filename).resolve()) for frame in reversed(frames) if frame.filename[:1] != "<"]
    found = [(f, path) for f, path in pairs if path.exists() and not str(path).startswith((*_LIBRARIES, PACKAGE))]
    if not found:
        return ""
    frame, _ = min(found, key=lambda pair: not pair[1].is_relative_to(home))
    path = Path(frame.filename)
    place = f"{path.relative_to(home) if path.is_relative_to(home) else path}:{frame.lineno}"
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0)
    return f"{place}: {line.strip()}" if text else place


def line_of(error: BaseException, script: Path) -> str:
    """The user's own line that raised an error."""
    return own_place(traceback.extract_tb(error.__traceback__), script, text=True)


def line_of_thread(thread: int, script: Path) -> str:
    """The user's own line that a thread is at now."""
    frame = sys._current_frames().get(thread)
    return own_place(traceback.extract_stack(frame), script, text=True) if frame is not None else ""


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
        rule = "the script must run on this machine's devices, but it asks for CUDA and there is none at"
        return f"{rule} {where}; choose the CPU and gloo in the script, or run it on a machine with a GPU"
    return f"the script raised {type(error).__name__}: {message:.300}" + (f" at {where}" if where else "")


def print_own_traceback(error: BaseException) -> None:
    """Print the traceback of a script without the frames of its wrapper."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if not frame.filename.startswith((PACKAGE, "<frozen"))]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    print("".join([*lines, *traceback.format_exception_only(error)]), end="", file=sys.stderr, flush=True)
