"""What a Parquet footer states, read without pyarrow."""

import io
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepsight.dataset.base.bounded import ReadError, read_parquet
from stepsight.dataset.base.parquet_footer import DEEPEST, MAGIC, read_footer

TABLE = pa.table({"a": ["x", "y", None] * 50, "b": [[1, 2], [], None] * 50, "c": [1.0, None, 2.0] * 50})


def _written(**options: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(TABLE.replace_schema_metadata({b"k": b"v"}), out, **options)
    return out.getvalue()


def _footer(data: bytes) -> bytes:
    return data + len(data).to_bytes(4, "little") + MAGIC


@pytest.mark.parametrize(
    "options",
    [{}, {"row_group_size": 7}, {"compression": "zstd"}, {"use_dictionary": False}, {"write_statistics": False},
     {"version": "1.0"}, {"write_page_index": True}, {"store_schema": False}],
)  # fmt: skip
def test_it_states_what_pyarrow_finds(options: dict[str, object]) -> None:
    data = _written(**options)
    found = pq.ParquetFile(io.BytesIO(data)).metadata
    groups = [found.row_group(index) for index in range(found.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    stated = read_footer(io.BytesIO(data))
    assert stated.num_rows == 150 == found.num_rows
    assert stated.num_values == sum(column.num_values for column in columns)
    assert stated.num_bytes == sum(column.total_uncompressed_size for column in columns)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PAR1PAR1",
        _footer(b""),
        _footer(b"\x00"),
        _footer(b"\x15"),
        _footer(b"\x1c" * (DEEPEST + 1)),
        _footer(b"\x19\xfc" + b"\xff" * 9 + b"\x01"),
        _footer(b"\x15" + b"\xff" * 11),
        _footer(b"\x18\xff\xff\xff\x0f"),
        _footer(b"\x19" * 5000),
        _footer(b"\x1b\xff"),
        _footer(b"\x1f"),
        b"\xff\xff\xff\x7f" + MAGIC,
    ],
)
def test_what_is_no_footer_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="Parquet"):
        read_footer(io.BytesIO(data))


def test_a_footer_of_flipped_bits_is_read_or_refused(tmp_path: Path) -> None:
    """pyarrow's own objects of column metadata end the process for some of these."""
    whole, rng, path = _written(), random.Random(0), tmp_path / "t.parquet"
    length = int.from_bytes(whole[-8:-4], "little")
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data) - 8 - length, len(data) - 8)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            read_parquet(path)
        except OSError as error:
            assert str(error)


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(_written() + b"x")
    with pytest.raises(ReadError, match="must be a whole Parquet file"):
        read_parquet(path)
