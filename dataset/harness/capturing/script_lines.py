"""The line of the user's own script in which something happens."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

_scripts: list[Path] = []


def set_script(path: Path) -> None:
    """Say which script runs: its files are those in its folder."""
    _scripts[:] = [path.resolve()]


def script_line() -> str:
    """``train.py:42`` of the innermost frame of the script that is running; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """``train.py:42`` of the innermost frame of the script that an error passed; empty if it passed none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _is_own(name: str) -> bool:
    if not _scripts or name.startswith("<"):
        return False
    path = Path(name)
    return path == _scripts[0] or (path.parent == _scripts[0].parent and "site-packages" not in name)
