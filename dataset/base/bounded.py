"""Read input files safely: only plain files, complete, and within a bounded number of bytes.

A few kilobytes of gzip can unpack to gigabytes.  Every reader of files that users name or download reads through this
module, so that one rule bounds them all: a file holds at most ``DEFAULT_GB`` gigabytes, packed or not, and no stretch
of ``STRETCH`` unpacked bytes takes less than one ``MOST_RATIO``-th of that in the file.  Traces and tables that people
share pack to 1/40 at most.  ``STEPSIGHT_MAX_DECOMPRESSED_GB`` replaces both limits by a size.

Readers raise ``OSError`` if a file is missing, and ``ReadError`` (an ``OSError``) if it is no plain or no whole file,
or larger than the limits.

A Parquet footer is read here before pyarrow reads the file, although pyarrow has its numbers too: it ends the whole
process where a hostile footer contradicts itself, since the exception that its C++ throws for
``RowGroupMetaData.column`` is never caught.  The footer is a structure of Thrift's compact protocol
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), whose fields are numbered in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import errno
import gzip
import os
import re
import stat
import struct
import tomllib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from stepsight.dataset.base.errors import MALFORMED, StepsightError

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray


VARIABLE = "STEPSIGHT_MAX_DECOMPRESSED_GB"
DEFAULT_GB = 4.0
_REMEDY = f"set {VARIABLE} to the gigabytes that you accept"
MOST_RATIO = 200
STRETCH = 64 * 2**20  # unpacked bytes from which a compression ratio is checked; less is harmless
MOST_TABLES = 2**20  # bytes of a file that people write, such as a job; parsing 10 MB of TOML takes 10 s and 1 GB
MOST_KEY_PARTS = 32  # of a TOML key: a.b.c has three
_KEY_PART = r"""(?:[\w-]++|"[^"]*+"|'[^']*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_KEY_PART}\.[ \t]*+){{{MOST_KEY_PARTS}}}{_KEY_PART}")
LONGEST_TEXT = 2**20  # bytes of one cell of a Parquet table
_CHUNK = 4 * 2**20
_GZIP = b"\x1f\x8b"
_WORDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


_folders: tuple[Path, ...] = ()  # that files are read from; empty: all


@contextmanager
def reading_only(folders: Sequence[Path]) -> Iterator[None]:
    """Let this process read files of these folders alone, also those that other files name: for a server."""
    global _folders
    before, _folders = _folders, tuple(folder.resolve() for folder in folders)
    try:
        yield
    finally:
        _folders = before


class ReadError(OSError):
    """A file that cannot be read; an ``OSError``, so that readers report it as they report a missing file."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def reason(error: Exception) -> str:
    """The problem with a file, in one line and without its path, which the caller adds."""
    if isinstance(error, RecursionError):
        return "it is nested thousands deep"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return "no " * isinstance(error, KeyError) + (text.splitlines() or [type(error).__name__])[0]


@contextmanager
def parsing(rule: str, kind: type[StepsightError]) -> Iterator[None]:
    """Raise ``kind`` with a rule for a file and the problem, where reading the file fails; its own errors pass.

    If the file that failed is another than the rule's, as a table of a folder, it is named too.
    """
    try:
        yield
    except kind:
        raise
    except (OSError, EOFError, *MALFORMED) as error:
        name = Path(str(error.filename)).name if isinstance(error, OSError) and error.filename else ""
        raise kind(f"{rule}: {name + ': ' if name not in rule else ''}{reason(error)}") from None


def read_file(path: Path) -> bytes:
    """Bytes of a plain file, unchanged."""
    with _opened(path) as file:
        return file.read()


def read_text(path: Path, encoding: str = "utf-8", most: int | None = None) -> str:
    """Text of a plain file with ``\n`` as line ends; ``most``: bytes that it may have, if less than all files may."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise ReadError(path, f"must hold at most {_size(most)}, got {_size(size)}")
        return file.read().decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def read_toml(path: Path, encoding: str = "utf-8") -> dict[str, Any]:
    """Tables of a plain TOML file of at most ``MOST_TABLES`` bytes.

    Raises ``ValueError`` if it is no TOML, or a key has more than ``MOST_KEY_PARTS`` parts, for which the parser takes
    hours.
    """
    text = read_text(path, encoding, MOST_TABLES)
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") >= MOST_KEY_PARTS and _LONG_KEY.search(line):
            raise ValueError(f"a key must have at most {MOST_KEY_PARTS} parts, got more in line {number}")
    return tomllib.loads(text)


def read_unpacked(path: Path) -> bytes:
    """Bytes of a plain file, unpacked if it is gzip."""
    return b"".join(unpacked_blocks(path, _CHUNK))


def unpacked_blocks(path: Path, size: int) -> Iterator[bytes]:
    """Bytes of a plain file in blocks of at most ``size``, unpacked if it is gzip."""
    (most, ratio), total, judged, taken = _limits(), 0, 0, 0
    with _opened(path) as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        if not packed:
            yield from iter(lambda: file.read(size), b"")
            return
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                while part := unpacked.read(size):
                    total += len(part)
                    if total > most:
                        raise ReadError(path, f"must unpack to at most {_size(most)}, got more: {_REMEDY}")
                    if (stretch := total - judged) >= STRETCH:
                        if stretch > ratio * max(file.tell() - taken, 1):
                            raise ReadError(path, _too_dense(stretch, file.tell() - taken))
                        judged, taken = total, file.tell()
                    yield part
        except ReadError:
            raise
        except (EOFError, OSError, zlib.error) as error:
            raise ReadError(path, f"must be a whole gzip file, got {error}") from None


def check_unpacked(num_bytes: int, packed_bytes: int, path: Path) -> None:
    """Check the size in memory that a file states, before it is allocated, and that of what holds it in the file."""
    most, ratio = _limits()
    if num_bytes > most:
        raise ReadError(path, f"must hold at most {_size(most)}, got {_size(num_bytes)}: {_REMEDY}")
    if num_bytes > STRETCH and num_bytes > ratio * packed_bytes:
        raise ReadError(path, _too_dense(num_bytes, packed_bytes))


def read_parquet(path: Path) -> pa.Table:
    """A Parquet table; its metadata is checked before anything is read."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with _opened(path) as source:
            (num_rows, num_values, num_bytes), schema = read_footer(source), pq.ParquetFile(source).schema_arrow
            cells = max(num_rows * max(1, len(schema)), num_values)
            check_unpacked(max(8 * cells, num_bytes), os.fstat(source.fileno()).st_size, path)
            texts = [each.name for each in schema if pa.types.is_string(each.type) or pa.types.is_binary(each.type)]
            # A text that millions of rows share is stored once, and stays so until it is known to be short.
            table = pq.ParquetFile(source, read_dictionary=texts).read()
        for index, field in enumerate(table.schema):
            if pa.types.is_dictionary(field.type):
                column, plain = table.column(index), schema.field(index).type
                lengths = (pc.max(pc.binary_length(each.dictionary)).as_py() for each in column.chunks)
                longest = max((length or 0 for length in lengths), default=0)
                if longest > LONGEST_TEXT:
                    raise ReadError(path, f"a text of a table must have at most {LONGEST_TEXT} bytes, got {longest}")
                table = table.set_column(index, field.with_type(plain), column.cast(plain))
        return table.replace_schema_metadata(schema.metadata)
    except ReadError:
        raise
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ReadError(path, f"must be a whole Parquet file, got {reason(error):.200}") from None


def read_numbers(table: pa.Table, name: str, dtype: Any) -> NDArray[Any]:
    """A column of a table as numbers of a type; ``ValueError`` if it holds anything else."""
    import numpy as np

    values = table.column(name).to_numpy()
    whole = np.dtype(dtype).kind == "i"
    right = values.dtype.kind in "iufb"
    if right and whole and values.dtype.kind == "f":
        right = bool((np.isfinite(values) & (np.round(values) == values)).all())
    if not right or (whole and len(values) and not -(2**62) <= values.min() <= values.max() <= 2**62):
        told = "whole numbers" if whole else "numbers"
        raise ValueError(f"column {name} must hold {told} throughout, got {table.column(name).type}")
    with np.errstate(over="ignore"):  # to infinity
        return np.asarray(values.astype(dtype))


def parquet_rows(path: Path) -> int:
    """Number of rows according to a Parquet file."""
    try:
        with _opened(path) as source:
            return read_footer(source)[0]
    except ValueError as error:
        raise ReadError(path, f"must be a whole Parquet file, got {reason(error):.200}") from None


def _opened(path: Path) -> BinaryIO:
    """Open a plain file of at most the limit; a FIFO or device is an error, without waiting for it."""
    if _folders and not any(path.resolve().is_relative_to(folder) for folder in _folders):
        raise ReadError(path, f"must be in {' or '.join(map(str, _folders[:1]))}, the folder that files are read from")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            kind = _WORDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise ReadError(path, f"must be a plain file, got {kind}: save what it gives to a file first")
        most = _limits()[0]
        if status.st_size > most:
            raise ReadError(path, f"must hold at most {_size(most)}, got {_size(status.st_size)}: {_REMEDY}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _limits() -> tuple[float, float]:
    """Limit of a file's bytes, and of the ratio of unpacked to packed bytes in a stretch."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return DEFAULT_GB * 1e9, MOST_RATIO
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < 1e9:
        raise StepsightError(f"{VARIABLE} must be a number of gigabytes > 0, got {text!r:.80}")
    return gigabytes * 1e9, float("inf")


def _too_dense(num_bytes: int, packed_bytes: int) -> str:
    sizes = f"{_size(num_bytes)} from {_size(packed_bytes)}"
    return f"must unpack to at most {MOST_RATIO} times its size, got {sizes}: {_REMEDY}"


def _size(num_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} bytes"


MAGIC = b"PAR1"
MOST_FOOTER = 4 * 2**20  # bytes; of tables with thousands of columns and row groups
DEEPEST = 32  # structures and lists within each other; Parquet's own have about ten
_ROWS, _GROUPS = 3, 4  # fields of FileMetaData
_CHUNKS, _META, _VALUES, _SIZE = 1, 3, 5, 6  # of RowGroup, of ColumnChunk, and two of ColumnMetaData
_TRUE, _FALSE, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, (9, 10), 12


def read_footer(file: BinaryIO) -> tuple[int, int, int]:
    """What a Parquet file states: rows of the table, values of all columns, and bytes that these take unpacked."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or not 0 < length <= min(size - 8, MOST_FOOTER):
        raise ValueError("an end without the length of a footer and PAR1")
    file.seek(size - 8 - length)
    try:
        footer = _thrift(file.read(length), 0, _STRUCT)[0]
        metas = [chunk[_META] for group in footer[_GROUPS] for chunk in group[_CHUNKS]]
        values, sizes = ([int(meta[field]) for meta in metas] for field in (_VALUES, _SIZE))
        return int(footer[_ROWS]), sum(max(0, n) for n in values), sum(max(0, n) for n in sizes)
    except (ValueError, struct.error) as error:
        raise ValueError(f"a damaged footer: {error}") from None
    except (KeyError, IndexError, TypeError):
        raise ValueError("a footer without rows, row groups, columns, values or sizes") from None


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, as Thrift and protobuf write it, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("the file ends within a number, or a number has more than 64 bits")


def _thrift(data: bytes, at: int, kind: int, depth: int = 1) -> tuple[Any, int]:
    """A value of Thrift's compact protocol, and where it ends; a structure is a table of its fields by number."""
    if depth > DEEPEST:
        raise ValueError(f"structures must be nested at most {DEEPEST} deep")
    if kind in (_TRUE, _FALSE, _BYTE):  # a truth value in a list takes a byte
        return data[at], at + 1
    if kind in _INTEGERS:
        value, at = read_varint(data, at)
        return (value >> 1) ^ -(value & 1), at
    if kind == _DOUBLE:
        return struct.unpack_from("<d", data, at)[0], at + 8
    if kind == _BINARY:
        count, at = read_varint(data, at)
        if count > len(data) - at:
            raise IndexError
        return data[at : at + count], at + count
    if kind in _LISTS:
        header, at = data[at], at + 1
        count, at = read_varint(data, at) if header >> 4 == 15 else (header >> 4, at)
        values = []
        for _ in range(count):
            value, at = _thrift(data, at, header & 15, depth + 1)
            values.append(value)
        return values, at
    if kind != _STRUCT:
        raise ValueError(f"it has no values of type {kind}")
    fields: dict[int, Any] = {}
    number = 0
    while header := data[at]:
        number, at = (number + (header >> 4), at + 1) if header >> 4 else _thrift(data, at + 1, _INTEGERS[0])
        if header & 15 in (_TRUE, _FALSE):
            fields[number] = header & 15 == _TRUE
        else:
            fields[number], at = _thrift(data, at, header & 15, depth + 1)
    return fields, at + 1
