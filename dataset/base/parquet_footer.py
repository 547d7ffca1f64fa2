"""Read what a Parquet file states of its columns, so that it can be judged before any column is read.

pyarrow has these numbers too, but it ends the whole process where a hostile footer contradicts itself: the exception
that its C++ throws for ``RowGroupMetaData.column`` is never caught.  The footer is a structure of Thrift's compact
protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), whose fields are numbered
in https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"PAR1"
MOST_FOOTER = 4 * 2**20  # bytes; of tables with thousands of columns and row groups
DEEPEST = 32  # structures and lists within each other; Parquet's own have about ten
_ROWS, _GROUPS = 3, 4  # fields of FileMetaData
_CHUNKS, _META, _VALUES, _SIZE = 1, 3, 5, 6  # of RowGroup, of ColumnChunk, and two of ColumnMetaData
_TRUE, _FALSE, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, (9, 10), 12


@dataclass(frozen=True)
class Stated:
    """What a footer states.

    Attributes:
        num_rows: Of the table.
        num_values: Of all columns of all row groups.
        num_bytes: That the values take when they are unpacked.
    """

    num_rows: int
    num_values: int
    num_bytes: int


def read_footer(file: BinaryIO) -> Stated:
    """Read the footer of a Parquet file.

    Raises:
        ValueError: If it is none.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - 8))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or not 0 < length <= min(size - 8, MOST_FOOTER):
        raise ValueError("Parquet must end with the length of its footer and PAR1")
    file.seek(size - 8 - length)
    try:
        footer = _Compact(file.read(length)).structure()
        metas = [chunk[_META] for group in footer[_GROUPS] for chunk in group[_CHUNKS]]
        values, sizes = ([int(meta[field]) for meta in metas] for field in (_VALUES, _SIZE))
        return Stated(int(footer[_ROWS]), sum(max(0, n) for n in values), sum(max(0, n) for n in sizes))
    except (KeyError, IndexError, TypeError, struct.error):
        raise ValueError("a Parquet footer must state rows, row groups, columns, values and sizes") from None


class _Compact:
    """Values of Thrift's compact protocol, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self._depth = data, 0, 0

    def structure(self) -> dict[int, Any]:
        """Return fields by their number."""
        self._enter()
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._integer()
            kind = header & 15
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind)
        self._depth -= 1
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):  # a truth value in a list takes a byte
            return self._byte()
        if kind in _INTEGERS:
            return self._integer()
        if kind == _DOUBLE:
            return struct.unpack("<d", self._bytes(8))[0]
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind in _LISTS:
            header = self._byte()
            count = self._unsigned() if header >> 4 == 15 else header >> 4
            self._enter()
            values = [self._value(header & 15) for _ in range(count)]
            self._depth -= 1
            return values
        if kind == _STRUCT:
            return self.structure()
        raise ValueError(f"a Parquet footer has no values of type {kind}")

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"structures of a Parquet footer must be nested at most {DEEPEST} deep")

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise IndexError
        self._at += count
        return self._data[self._at - count : self._at]

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("an integer of a Parquet footer must have at most ten bytes")

    def _integer(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
