"""A process whose disk fails at one chosen point: killed there, or full from there on.

As SQLite's crash tests do, every point is tried in turn.  A point is a write, rename, fsync, creation or removal of a
file in the watched folder.  The process is forked, so that an end there is an end: nothing tidies up.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

KILLED = 137  # exit code of a process that ended at its point
How = Literal["count", "kill", "full"]
_CALLS = (
    "replace",
    "rename",
    "mkdir",
    "unlink",
    "remove",
    "rmdir",
    "fsync",
    "link",
    "symlink",
    "truncate",
    "ftruncate",
)
_MAY_FREE = ("unlink", "remove", "rmdir")  # what a full disk still does


class Disk:
    """Counts what this process does to files in a folder, and fails at the n-th.

    Args:
        folder: What is watched.
        at: The point that fails, from 1.
        how: ``count`` fails nowhere; ``kill`` ends the process, a write half done; ``full`` raises ENOSPC from then on.
    """

    def __init__(self, folder: Path, at: int, how: How) -> None:
        self.folder, self.at, self.how, self.points = str(folder.resolve()), at, how, 0

    def install(self) -> None:
        """Replace the calls of ``os`` and ``io`` through which Python writes; for good, in this process."""
        for name in _CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        system_open, whole_open, write = os.open, io.open, os.write

        def open_(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if set(mode) & set("wax+") and self._holds(file):
                self._point("open")
                return _opened(self, file, mode, *arguments, **named)
            return whole_open(file, mode, *arguments, **named)

        def os_open(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self._holds(path):
                self._point("open")
            return system_open(path, flags, *arguments, **named)

        def os_write(descriptor: int, data: Any) -> int:
            if self._holds(descriptor):
                self._point("write", lambda: write(descriptor, bytes(data)[: len(data) // 2]))
            return write(descriptor, data)

        for module in (io, builtins, sys.modules["_io"]):
            module.open = open_  # type: ignore[attr-defined]
        os.open, os.write = os_open, os_write

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(first: Any, *arguments: Any, **named: Any) -> Any:
            if "dir_fd" in named or self._holds(first):
                self._point(name)
            return call(first, *arguments, **named)

        return watched

    def _holds(self, file: Any) -> bool:
        if isinstance(file, int):
            try:
                file = Path(f"/proc/self/fd/{file}").readlink()
            except OSError:
                return False
        try:
            path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100
        except TypeError:
            return False
        return path.startswith(self.folder + os.sep)

    def _point(self, name: str, half: Callable[[], Any] | None = None) -> None:
        self.points += 1
        if self.how == "kill" and self.points == self.at:
            if half is not None:
                half()
            os._exit(KILLED)
        if self.how == "full" and self.points >= self.at and name not in _MAY_FREE:
            if half is not None and self.points == self.at:
                half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Raw(io.FileIO):
    """A file whose writes are points."""

    def __init__(self, disk: Disk, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode, closefd, opener)
        self._disk = disk

    def write(self, data: Any) -> int:
        half = bytes(data)[: len(data) // 2]
        self._disk._point("write", lambda: io.FileIO.write(self, half))
        return super().write(data)


def _opened(
    disk: Disk,
    file: Any,
    mode: str,
    buffering: int = -1,
    encoding: Any = None,
    errors: Any = None,
    newline: Any = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    raw = _Raw(disk, file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if buffering == 0:
        return raw
    buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


def forked(work: Callable[[], int], disk: Disk | None, errors: Path, seconds: int = 120) -> int:
    """Run some work in a forked process on a disk; returns its exit code.

    What it prints goes to the file ``errors``.  With ``how="count"`` the number of points is its last line.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        log = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
        )
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of computing: a busy machine is slower
        signal.alarm(10 * seconds)
        if disk is not None:
            disk.install()
        code = work()
        if disk is not None:
            sys.stderr.write(f"\n{disk.points}")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if disk is not None:
            sys.stderr.write(f"\n{disk.points}")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def count_points(work: Callable[[], int], folder: Path, errors: Path) -> int:
    """How many points some work has in a folder; it must succeed."""
    code = forked(work, Disk(folder, 0, "count"), errors)
    text = errors.read_text()
    assert code == 0, f"exit code {code}: {text}"
    return int(text.rsplit("\n", 1)[1])
