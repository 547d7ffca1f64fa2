"""Files are complete or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

UNFINISHED = ".tmp"  # end of the name of a temporary file or folder, which its writer holds locked


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside ``path``, which is renamed to ``path`` if the block succeeds."""
    remove_left(path)
    handle, name = tempfile.mkstemp(UNFINISHED, f".{path.name}.", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with locked(temporary):
            yield temporary
            temporary.chmod(0o644)  # temporary files are readable only by their owner
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_left(path: Path) -> None:
    """Make the folder of ``path``, and remove the temporary files and folders that killed writers of ``path`` left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 10.0:  # a new one may be unlocked yet
                with locked(left) as free:
                    if free and (path.exists() or not (left / path.name).exists()):  # else it is the old folder
                        shutil.rmtree(left) if left.is_dir() else left.unlink()


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write JSON completely or not at all; NaN is an error."""
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent, allow_nan=False) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Value of a JSON file; see ``parse_json``."""
    return parse_json(path.read_text("utf-8"))


def parse_json(text: str) -> Any:
    """Value of strict JSON: no key twice, no NaN or infinity, whole characters, sane depth; else a ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"every key must be there once, got {Counter(keys).most_common(1)[0][0]!r:.80} twice")
        return out

    def constant(name: str) -> None:
        raise ValueError(f"a number must be finite, got {name}")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise ValueError("tables must not be nested thousands deep") from None
    if "\\ud" in text.lower():  # half of a surrogate pair is no character, and cannot be printed
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("text must be whole characters, got half of a surrogate pair") from None
    return value


@contextmanager
def new_folder(path: Path, temporary: Path) -> Iterator[Path]:
    """Make ``temporary`` empty, and rename it to ``path`` on the same file system if the block succeeds."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process gets the lock of a file or folder, until it ends; with ``wait`` it waits for others."""
    lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if wait:
            raise
        yield False
    else:
        yield True
    finally:
        os.close(lock)
