"""Files are complete or absent: they are written under a temporary name, then renamed.

Trained models are saved as JSON, by the fields of their dataclasses (``Saved``).  Reading makes texts, numbers, arrays
and the classes that the annotations name; nothing in a file is executed or imported.  A class that is saved in another
form than its fields overrides one of the two methods.
"""

from __future__ import annotations

import csv
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from stepsight.dataset.base.bounded import MOST_TABLES, read_file, read_text, read_toml, reason
from stepsight.dataset.base.caching import cached
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.harness.base import atomic_files  # it must stand alone
from stepsight.dataset.harness.base.atomic_files import parse_json as parse_json


@cached(32)
def preset(name: str) -> Any:
    """Facts of the package: what a ``.toml`` of ``dataset/presets`` holds, or the rows of a ``.csv``."""
    text = resources.files("stepsight.dataset").joinpath("presets", name).read_text("utf-8")
    return tomllib.loads(text) if name.endswith(".toml") else [*csv.DictReader(text.splitlines())]


LONGEST_NAME, LONGEST_PATH = 255, 2000  # bytes that file systems take


def named_path(text: str) -> Path:
    """The path that a user names; refused if no file can have it."""
    path = Path(text)
    try:
        long = max(map(len, map(os.fsencode, path.parts)), default=0) > LONGEST_NAME
        long = long or len(os.fsencode(path)) > LONGEST_PATH
    except UnicodeEncodeError:  # half of a surrogate pair
        long = True
    if not text or long or "\0" in text:
        rule = f"a path must have 1 to {LONGEST_PATH} bytes, at most {LONGEST_NAME} in each name, and no null byte"
        raise StepsightError(f"{rule}, got {text!r:.80}")
    return path


def check_output_file(named: Path, *, made: bool = False) -> None:
    """Check, before long work, that a file can be written: a device or a folder is never replaced.

    The folder of a file that a user names must be there, since it may be mistyped; ``made``: it may be new.
    """
    path = Path(os.path.realpath(named))  # follow a link instead of replacing it; a link to itself stays a link
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise StepsightError(f"an output must be a new or plain file, got {path}")
    if not made and not path.parent.is_dir():
        raise StepsightError(f"an output file needs a folder that is there, got {str(named)!r:.200}: make it first")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Check that a folder exists or can be created, and that files can be written into it."""
    there = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        rule = "an output needs a folder that can be written to"
        raise StepsightError(f"{rule}, got {there}: {error.strerror}") from None


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``, which is renamed to ``path`` if the block succeeds."""
    check_output_file(path, made=True)
    with _naming(path := path.resolve()), atomic_files.new_file(path) as temporary:
        yield temporary


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    write_pieces(path, [text.encode()])


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file that is made piece by piece, completely or not at all."""
    with new_file(path) as temporary, temporary.open("wb") as file:
        file.writelines(pieces)


def read_json(path: Path) -> Any:
    """Value of a JSON file; see ``bounded.read_text`` and ``parse_json``."""
    return parse_json(read_text(path))


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write JSON whole or not at all; NaN is refused.  Without ``indent`` it takes a tenth of the time."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``, which is renamed to ``path`` if the block succeeds."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise StepsightError(f"an output must be a new folder or an existing one of the same kind, got {path}")
    path = path.resolve()
    atomic_files.remove_left(path)
    temporary = Path(tempfile.mkdtemp(atomic_files.UNFINISHED, f".{path.name}.", path.parent))
    temporary.chmod(0o755)
    try:
        with _naming(path), atomic_files.locked(temporary):
            yield temporary
            _put(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of a failed write, for example on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _put(new: Path, path: Path) -> None:
    """Rename a folder to ``path``; the old content is deleted only after that."""
    aside = Path(tempfile.mkdtemp(atomic_files.UNFINISHED, f".{path.name}.", path.parent))
    old = aside / path.name
    try:
        if path.exists():
            path.replace(old)
        new.replace(path)
    except BaseException as error:
        if old.exists() and not path.exists():
            old.replace(path)  # if this fails too, the old folder stays in ``aside``, where ``set_aside`` finds it
        shutil.rmtree(aside, ignore_errors=True)
        taken = isinstance(error, FileNotFoundError) and new.exists()  # the old folder, by another process
        if taken or (isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)):
            rule = f"{path} was written by another process meanwhile, and stays as that wrote it"
            raise StepsightError(f"{rule}: run again, or choose another folder") from None
        raise
    shutil.rmtree(aside, ignore_errors=True)


def set_aside(path: Path) -> Path | None:
    """The old content of ``path`` after a replacement that was killed half-way (see ``_put``), if there was one."""
    if path.exists() or not path.parent.is_dir():
        return None
    path = path.resolve()
    name = glob.escape(path.name)
    return max(path.parent.glob(f".{name}.*/{name}"), key=lambda old: old.stat().st_mtime, default=None)


def digest(*parts: bytes | str) -> str:
    """Short SHA-256 of the parts, 16 hexadecimal digits."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part)
        sha.update(b"\0")
    return sha.hexdigest()[:16]


def digest_files(paths: list[Path]) -> str:
    """Digest of files by name and content, in the order of their names."""
    return digest(*(part for path in sorted(paths) for part in (path.name, read_file(path))))


T = TypeVar("T")
SUFFIXES = (".toml", ".json")  # a name of hardware, a fabric or a framework that ends so is a path


def file_version(path: str) -> tuple[int, int]:
    """Time of the last change and size of a file, as part of a cache's key; zeros if it does not exist."""
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def read_document(path: Path, name: str) -> Any:
    """Value of a TOML or JSON file that people write, by its suffix; a ``JobError`` calls it by ``name``."""
    toml = path.suffix == ".toml"
    try:
        return read_toml(path, "utf-8-sig") if toml else parse_json(read_text(path, "utf-8-sig", MOST_TABLES))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read {name}: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{name} is not valid {path.suffix[1:].upper()}: {reason(error):.200}") from None


def read_facts(path: str, sections: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Tables of a TOML or JSON file, by its suffix; ``sections``: what names of tables of tables it may have."""
    tables = read_document(Path(path), "it")
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
    """The only object of its kind in a file."""
    if len(found) != 1:
        raise JobError(f"{path} must hold exactly one {noun}, got {', '.join(found) or 'none'}")
    return next(iter(found.values()))


UNSAVED: Mapping[str, Any] = {"saved": False}  # metadata of a field that stays out of the file
OPTIONAL: Mapping[str, Any] = {"optional": True}  # of one that files of earlier versions lack
IF_SET: Mapping[str, Any] = {"optional": True, "if_set": True}  # of one that is left out while it has its default
ROUNDED: Mapping[str, Any] = {"digits": 6}  # of numbers that are saved with so many digits after the point

_hints: Any = cached(1024)(get_type_hints)


class Saved:
    """A dataclass that is saved as JSON by its fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``from_dict`` reads them."""
        table = {}
        for each in _saved_fields(type(self)):
            value = plain(getattr(self, each.name), each.metadata.get("digits"))
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if not (each.metadata.get("if_set") and value == plain(default)):
                table[each.name] = value
        return table

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], **given: Any) -> Self:
        """Read the result of ``to_dict``; ``given``: fields that are not in it.

        Raises ``KeyError``, ``TypeError`` or ``ValueError`` if a field is missing, or is not of its type.
        """
        hints = _hints(cls)
        for each in _saved_fields(cls):
            if each.name in value:
                given[each.name] = _read(hints[each.name], value[each.name], each.name)
            elif each.name not in given and not each.metadata.get("optional"):
                raise KeyError(each.name)
        return cls(**given)


def plain(value: Any, digits: int | None = None) -> Any:
    """A value of a field as JSON has it; ``digits``: of its numbers after the point, None: all."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, np.ndarray | float) and digits is not None:
        return np.round(value, digits).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(item, digits) for key, item in value.items()}
    return [plain(item, digits) for item in value] if isinstance(value, tuple | list) else value


def _saved_fields(cls: Any) -> list[Field[Any]]:
    return [each for each in fields(cls) if each.init and each.metadata.get("saved", True)]


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value of an annotated type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else _read(next(a for a in arguments if a is not type(None)), value, name)
    if origin is np.ndarray:
        return np.array(value, dtype=np.float64)
    if origin is tuple:
        check_type(value, list, name)
        items = arguments[:1] * len(value) if Ellipsis in arguments else arguments
        return tuple(_read(of, item, name) for of, item in zip(items, value, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        check_type(value, dict, name)
        return {arguments[0](key): _read(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    if hasattr(kind, "_fields"):
        return kind(**{key: _read(of, value[key], f"{name}.{key}") for key, of in _hints(kind).items()})
    if kind is float:
        check_type(value, float, name)
        return float(value)
    check_type(value, kind, name)
    return value


_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"
}  # fmt: skip


def check_type(value: Any, kind: type[Any], name: str) -> None:
    """Raise ``ValueError`` unless a value is of a type; whole numbers are numbers, true and false are not."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r:.80}")
