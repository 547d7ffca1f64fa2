"""Files are complete or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON whole or not at all; NaN is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1, allow_nan=False)
            stream.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Value of a JSON file."""
    return json.loads(path.read_text("utf-8"))


@contextmanager
def new_folder(path: Path, temporary: Path) -> Iterator[None]:
    """Make ``temporary`` empty, and rename it to ``path`` when the block ends well.

    Both must lie on one file system; what a killed process left in ``temporary`` is removed first.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
