"""The streams of the command line: closed ones, full disks, and terminals with few characters."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
import sys
from collections.abc import Iterator

from stepsight.dataset.base.errors import StepsightError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def prepare_streams() -> None:
    """Make stdout and stderr accept every character: a character that the terminal lacks is written as its code.

    Raises:
        StepsightError: If stdout is closed, since nobody would get the answer.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the next opened file would get this number
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # print would write to stdout
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        raise StepsightError("stdout must be open to take the answer, got a closed one: send it to a file or /dev/null")


def finish_stdout() -> OSError | None:
    """Write the rest of stdout; return why that failed, None if it did not.

    What could not be written is dropped, so that the interpreter does not try again when it ends.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        return error
    return None


def storage_problem(error: BaseException) -> str:
    """What is wrong with the disk, if that caused an error of a library; else ""."""
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            where = f": {link.filename}" if link.filename else ""
            return f"cannot write: {os.strerror(link.errno or 0)}{where}"
        if isinstance(link, sqlite3.OperationalError) and ("is full" in str(link) or "disk I/O" in str(link)):
            return f"cannot write a database: {link}"
    text = str(error)
    if "No space left on device" in text or "database or disk is full" in text:  # of libraries in other languages
        return f"cannot write: No space left on device ({type(error).__name__})"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
