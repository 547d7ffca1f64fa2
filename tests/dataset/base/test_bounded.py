"""Input files: plain, whole, and bounded in what they unpack to."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepsight.dataset.base import bounded
from stepsight.dataset.base.bounded import (
    DEEPEST,
    MAGIC,
    MOST_KEY_PARTS,
    ReadError,
    parsing,
    read_file,
    read_footer,
    read_parquet,
    read_text,
    read_toml,
    read_unpacked,
)
from stepsight.dataset.base.errors import JobError, StepsightError, TableError, TraceError
from stepsight.dataset.job.job import Job
from stepsight.dataset.tables import read_table
from stepsight.dataset.traces.read_rank import read_kineto
from stepsight.experiments.evaluation.runs_table import read_runs_table
from stepsight.simulator.schedules import read_schedule
from stepsight.training.predictor.predictor import Predictor

MEGABYTE = 2**20


def bomb(path: Path, megabytes: int = 200) -> Path:
    """Gzip of so many megabytes of spaces, about 1000 times smaller."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(megabytes):
            file.write(b" " * MEGABYTE)
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bomb(tmp_path_factory.mktemp("bombs") / "bomb.csv.gz")


def test_a_bomb_is_given_up_where_its_ratio_shows(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one stretch is unpacked, and the message says the limit and how to raise it."""
    with pytest.raises(ReadError, match=r"at most 200 times its size, got 67.1 MB from .*kB: set STEPSIGHT_MAX_"):
        read_unpacked(packed)
    monkeypatch.setenv(bounded.VARIABLE, "0.3")
    assert len(read_unpacked(packed)) == 200 * MEGABYTE
    monkeypatch.setenv(bounded.VARIABLE, "0.1")
    with pytest.raises(ReadError, match="must unpack to at most 100 MB, got more"):
        read_unpacked(packed)


def test_a_bomb_behind_a_harmless_start_is_found(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(os.urandom(2 * MEGABYTE)) + gzip.compress(bytes(150 * MEGABYTE)))
    with pytest.raises(ReadError, match="200 times"):
        read_unpacked(path)


def test_every_reader_of_packed_files_refuses_it(packed: Path, tmp_path: Path) -> None:
    """Runs, traces, tables and predictors: one line each, of the reader's own kind."""
    for name in ("aicb", "csv", "neusight", "nccl-tests"):
        with pytest.raises(TableError, match="200 times"):
            read_table(name, packed)
    with pytest.raises(TableError, match="200 times"):
        read_runs_table(packed)
    with pytest.raises(TraceError, match="200 times"):
        read_kineto(packed)
    folder = tmp_path / "predictor"
    folder.mkdir()
    for file in (Path(bounded.__file__).parents[2] / "training/shipped/predictors/a100-sxm").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "kernel.gemm.txt.gz").write_bytes(packed.read_bytes())
    with pytest.raises(StepsightError, match=r"changed|200 times"):
        Predictor.load(folder)


def test_a_packed_archive_of_logs_and_a_sparse_member_are_bounded(packed: Path, tmp_path: Path) -> None:
    outer = tmp_path / "logs.tgz"
    outer.write_bytes(packed.read_bytes())
    with pytest.raises(TableError, match="200 times"):
        read_table("nccl-tests", outer)
    sparse = tmp_path / "logs.tar"
    with tarfile.open(sparse, "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("all_reduce_perf.log")
        member.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.size": str(10**10),
            "GNU.sparse.map": "9999999999,1",
            "GNU.sparse.numblocks": "1",
        }
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(TableError, match=r"at most 4 GB, got 10 GB"):
        read_table("nccl-tests", sparse)


def test_parquet_is_judged_by_its_metadata_before_it_is_read(tmp_path: Path) -> None:
    """Columns of one value take no room in the file, and all of it in memory."""
    path = tmp_path / "gemm_perf.parquet"
    pq.write_table(pa.table({"m": pa.array([7]).take(pa.array([0] * 20_000_000, pa.int32()))}), path)
    assert path.stat().st_size < MEGABYTE / 2
    with pytest.raises(ReadError, match="200 times its size, got 160 MB"):
        read_parquet(path)
    with pytest.raises(TableError, match="200 times"):
        read_table("aiconfigurator", path)


def test_a_long_text_shared_by_many_rows_is_refused_while_it_is_small(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 2 * MEGABYTE]))
    pq.write_table(pa.table({"text": texts}), path, store_schema=False, compression="zstd")
    with pytest.raises(ReadError, match="at most 1048576 bytes, got 2097152"):
        read_parquet(path)


def test_parquet_comes_as_arrow_reads_it(tmp_path: Path) -> None:
    table = pa.table({"a": ["x", "y", "x", None], "b": [[1, 2], [], [3], None], "c": [1.0, None, 2.0, 3.0]})
    table = table.replace_schema_metadata({b"key": b"value"})
    pq.write_table(table, tmp_path / "t.parquet")
    read = read_parquet(tmp_path / "t.parquet")
    assert read.equals(table) and read.schema.equals(pq.read_table(tmp_path / "t.parquet").schema, check_metadata=True)


def test_a_large_plain_file_is_refused_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    with path.open("wb") as file:
        file.truncate(10**10)  # takes no room
    with pytest.raises(JobError, match=r"at most 4 GB, got 10 GB: set STEPSIGHT_MAX_DECOMPRESSED_GB"):
        Job.from_file(path)
    monkeypatch.setenv(bounded.VARIABLE, "lots")
    with pytest.raises(StepsightError, match="must be a number of gigabytes > 0, got 'lots'"):
        read_file(path)


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    """A FIFO without a writer would block for ever."""
    for name in ("job.toml", "runs.csv", "trace.json", "order.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(JobError, match="must be a plain file, got a FIFO"):
        Job.from_file(tmp_path / "job.toml")
    with pytest.raises(TableError, match="a FIFO"):
        read_runs_table(tmp_path / "runs.csv")
    with pytest.raises(TraceError, match="a FIFO"):
        read_kineto(tmp_path / "trace.json")
    with pytest.raises(JobError, match="a FIFO"):
        read_schedule(tmp_path / "order.csv")
    with pytest.raises(TableError, match="must be a file or a folder"):
        read_table("csv", tmp_path / "runs.csv")
    with pytest.raises(ReadError, match="a device"):
        read_file(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


def test_line_ends_are_those_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(tmp_path / "a.txt", "utf-8-sig") == "a\nb\nc\n"


@pytest.mark.parametrize("text", ["{} = 1", "[{}]", "x = {{{} = 1}}", " {} = {{a = 1.5}} # 0.5"])
@pytest.mark.parametrize("part", ["a", '"a b"', "'.'", "a-1 "])
def test_a_key_of_a_toml_file_has_few_parts(tmp_path: Path, text: str, part: str) -> None:
    """The parser's time grows with the square of their number, or faster."""
    path = tmp_path / "a.toml"
    path.write_text(text.format(".".join([part] * MOST_KEY_PARTS)))
    assert read_toml(path)
    path.write_text("a = 1\n" + text.format(".".join([part] * (MOST_KEY_PARTS + 1))))
    with pytest.raises(ValueError, match="a key must have at most 32 parts, got more in line 2"):
        read_toml(path)


@pytest.mark.parametrize("many", ["# " + 99 * ".", "a = [" + 99 * "0.5, " + "]", "a = [\n" + 99 * "0.5, " + "\n]"])
def test_points_that_are_in_no_key_are_not_counted(tmp_path: Path, many: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(many)
    read_toml(path)


@pytest.mark.parametrize("name", ["job.toml", "job.json"])
def test_a_job_file_is_as_large_as_one_that_is_written(tmp_path: Path, name: str) -> None:
    """Parsing 10 MB of TOML takes 10 s and 1 GB."""
    path = tmp_path / name
    path.write_text("[model]\n" + "#" * MEGABYTE)
    with pytest.raises(JobError, match=r"job\.(toml|json): must hold at most 1.05 MB, got 1.05 MB"):
        Job.from_file(path)


def test_an_error_tells_of_some_problems_where_there_are_thousands(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("".join(f"[a{number}]\n" for number in range(5000)))
    with pytest.raises(JobError, match=r"unknown table \[a\d+\]; and \d+ more$"):
        Job.from_file(path)


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
    num_rows, num_values, num_bytes = read_footer(io.BytesIO(data))
    assert num_rows == 150 == found.num_rows
    assert num_values == sum(column.num_values for column in columns)
    assert num_bytes == sum(column.total_uncompressed_size for column in columns)


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
    with pytest.raises(ValueError, match="footer"):
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


def test_the_file_that_fails_is_named_once(tmp_path: Path) -> None:
    """A rule may be about a folder or another file than the one that cannot be read."""
    path = tmp_path / "one.nodes.parquet"
    held = ((f"{tmp_path} must hold tables", f"{path.name}: No such file"), (f"{path} is a table", "No such"))
    for rule, told in held:
        with pytest.raises(TraceError) as caught, parsing(rule, TraceError):
            read_file(path)
        assert str(caught.value).startswith(f"{rule}: {told}")
