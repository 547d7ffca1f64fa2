"""Users' files (TOML or JSON) of hardware, fabrics and framework profiles, in the form of the package's presets.

::

    [hardware.my-gpu]                   # fields of ``Hardware``
    kind = "gpu"
    ...
    [fabric.my-nodes]                   # optional: the usual fabric of my-gpu
    intra_node = { bandwidth_gbytes_per_s = 300.0, latency_us = 5.0 }
    inter_node = { bandwidth_gbytes_per_s = 25.0, latency_us = 10.0 }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stepsight.dataset.base.bounded import read_text, read_toml, reason
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import parse_json

T = TypeVar("T")
SUFFIXES = (".toml", ".json")


def is_facts_file(name: str) -> bool:
    """Whether a name of hardware, fabric or framework is the path of a file."""
    return name.endswith(SUFFIXES)


def file_version(path: str) -> tuple[int, int]:
    """Time of the last change and size of a file, as part of a cache's key; zeros if it does not exist."""
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def read_facts(path: str, sections: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Tables of a file.

    Args:
        path: A TOML or JSON file, by its suffix.
        sections: Names that its tables may have; empty: any.

    Raises:
        JobError: If it cannot be read, is not TOML or JSON, or holds anything but tables of tables of these names.
    """
    toml = path.endswith(".toml")
    try:
        tables = read_toml(Path(path)) if toml else parse_json(read_text(Path(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read it: {reason(error)}") from None
    except RecursionError:
        raise JobError("it must be tables of values, got tables nested too deeply") from None
    except ValueError as error:
        raise JobError(f"it must be {'TOML' if toml else 'JSON'}, got: {error}") from None
    if not isinstance(tables, dict):
        raise JobError(f"it must hold tables, got {tables!r:.80}")
    unknown = [name for name in tables if sections and name not in sections]
    if unknown:
        allowed = ", ".join(f"[{section}.NAME]" for section in sections)
        raise JobError(f"it must hold tables {allowed}, got {', '.join(map(repr, unknown))}")
    for name, table in tables.items():
        inner = table.values() if sections and isinstance(table, dict) else [table]
        if not all(isinstance(value, dict) for value in inner):
            raise JobError(f"[{name}{'.NAME' if sections else ''}] must be a table, got {table!r:.80}")
    return tables


def only_one(found: Mapping[str, T], noun: str, path: str) -> T:
    """The only object of its kind in a file.

    Raises:
        JobError: If there is none, or more than one.
    """
    if len(found) != 1:
        raise JobError(f"{path} must hold exactly one {noun}, got {', '.join(found) or 'none'}")
    return next(iter(found.values()))
