"""Messages about errors of a script."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from ..script_lines import PACKAGE, line_of

_NO_CUDA = (
    "Torch not compiled with CUDA",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "_cuda_",
    "NCCL built in",
)


def told(error: BaseException, script: Path) -> str:
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


def print_own_traceback(error: BaseException, below: TracebackType | None = None) -> None:
    """Print the traceback of a script without the frames of its wrapper."""
    frames = traceback.extract_tb(below or error.__traceback__)
    shown = [frame for frame in frames if not frame.filename.startswith((PACKAGE, "<frozen"))]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    sys.stderr.write("".join([*lines, *traceback.format_exception_only(error)]))
    sys.stderr.flush()
