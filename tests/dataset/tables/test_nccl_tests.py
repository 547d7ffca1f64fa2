"""nccl-tests: logs as printed, and parsed."""

import tarfile
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract


def _header(test: str, hosts: int, per_host: int) -> str:
    ranks = "".join(
        f"#  Rank {rank:2d} Group  0 Pid {rank + 7} on node-{rank // per_host} device {rank % per_host:2d} "
        f"[0000:1b:00] NVIDIA H100 80GB HBM3\n"
        for rank in range(hosts * per_host)
    )
    return (
        f"# Collective test starting: {test}_perf\n"
        "# nThread 1 nGpus 1 minBytes 33554432 maxBytes 67108864 step: 2(factor) warmup iters: 1 iters: 20\n"
        f"# Using devices\n{ranks}#\n"
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw\n"
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)\n"
    )


def _row(work: str, out_of_place: str, in_place: str) -> str:
    return "   ".join([" ", *work.split(), *out_of_place.split(), *in_place.split()]) + "\n"


class TestLog(TableReaderContract):
    format = "nccl-tests"
    place = "logs/nccl_N2_G2.log"
    text = (
        "# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703\n"
        + _header("all_reduce", 1, 4)
        + _row("33554432 8388608 float sum -1", "182.98 183.38 320.91 0", "180.00 186.41 326.2 0")
        + "# Out of bounds values : 0 OK\n"
        + "node-1: Test NCCL failure common.cu:1000 'unhandled system error'\n"
        + _header("all_gather", 2, 2)
        + _row("0 0 float none -1", "0.20 0.00 0.00 0", "0.19 0.00 0.00 0")
        + _row("33554432 524288 double none -1", "123.25 272.25 238.22 0", "120.28 278.96 244.09 0")
        + _row("67108864 1048576 double none -1", "240.00 279.62 244.67 5", "239.00 280.79 245.7 5")
        + _header("sendrecv", 2, 2)
        + _row("33554432 4194304 double sum -1", "2331.83 14.39 14.39 0", "2314.05 14.50 14.50 N/A")
    )

    def test_runs_of_a_log_have_their_own_ranks(self, table: Measurements) -> None:
        """Four ranks of one node, then two each of two; an all-gather's size is its output."""
        assert table.works == (
            Collective("all_reduce", 33554432, 4, 4),
            Collective("all_gather", 33554432, 4, 2),
            Collective("send_recv", 33554432, 2, 1),
        )
        assert set(table.device) == {"h100-sxm-80gb"} and table.fabric == ("dgx-h100", "", "")

    def test_all_reduce_is_in_place_and_others_are_not(self, table: Measurements) -> None:
        assert table.seconds.tolist() == pytest.approx([180.00e-6, 123.25e-6, 2331.83e-6])
        assert set(table.software) == {"nccl-tests nccl 2.27.3"}  # one software: training keeps what ran most rows

    def test_what_is_no_message_or_wrong_is_left_out(self, table: Measurements) -> None:
        assert table.skipped == {"no message size": 1, "wrong results": 1}

    def test_a_row_that_contradicts_itself_is_left_out(self, tmp_path: Path) -> None:
        """Size over time is the bandwidth that the row says; a row of a type that is not known is counted too."""
        odd = _row("33554432 524288 int4 none -1", "123.25 272.25 238.22 0", "120.28 278.96 244.09 0")
        (tmp_path / "a.log").write_text(self.text.replace("123.25", "12.325") + odd)
        table = read_table("nccl-tests", tmp_path / "a.log")
        assert [work.kind for work in table.works] == ["all_reduce", "send_recv"]
        assert [why[:30] for why in table.skipped] == [
            "no message size",
            "algbw must be size / time, got",
            "wrong results",
            "a row of a type that is not kn",
        ]


def test_old_logs_name_neither_root_nor_test(tmp_path: Path) -> None:
    """Then the file's name says the test, and a row's last eight columns are times and bandwidths."""
    path = tmp_path / "run_all_gather_perf.txt"
    header = _header("", 1, 2).replace("# Collective test starting: _perf\n", "")
    path.write_text(header + _row("33554432 4194304 float", "123.25 272.25 136.1 0", "120.28 278.96 139.5 0"))
    assert read_table("nccl-tests", path).works == (Collective("all_gather", 33554432, 2, 2),)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.log", _header("", 1, 2).replace("_perf", "") + _row("8 2 float sum -1", "5 0 0 0", "5 0 0 0"), "its test"),
        ("all_reduce_perf.log", _row("8 2 float sum -1", "5 0 0 0", "5 0 0 0"), "two ranks or more"),
        ("a.log", "# Collective test starting: all_reduce_perf\n", "must list its ranks"),
    ],
)
def test_a_log_that_says_too_little_is_refused(tmp_path: Path, name: str, text: str, rule: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TableError, match=rule):
        read_table("nccl-tests", tmp_path / name)


@pytest.mark.parametrize(
    ("name", "rows", "kind"),
    [
        (
            "allgather.out.log",
            _row("33554432 4194304 float", "123.25 272.25 136.1 0", "120.28 278.96 139.5 0"),
            "all_gather",
        ),
        (
            "a.log",
            _row("33554432 8388608 float sum -1", "123.25 272.25 408.4 0", "120.28 278.96 418.4 0"),
            "all_reduce",
        ),
        (
            "a.log",
            _row("33554432 8388608 float sum -1", "123.25 272.25 204.2 0", "120.28 278.96 209.2 0"),
            "reduce_scatter",
        ),
    ],
)
def test_a_log_without_its_test_is_known_by_its_name_or_by_its_bandwidths(
    tmp_path: Path, name: str, rows: str, kind: str
) -> None:
    """Bus bandwidth is 1.5 times the other in an all-reduce of four ranks, 0.75 times in a reduce-scatter."""
    (tmp_path / name).write_text(_header("", 2, 2).replace("# Collective test starting: _perf\n", "") + rows)
    assert [work.kind for work in read_table("nccl-tests", tmp_path / name).works] == [kind]


def test_a_folder_is_read_without_the_logs_that_cannot_be(tmp_path: Path) -> None:
    """They are counted, with an example; a folder of such logs alone is refused."""
    (tmp_path / "broken.log").write_text("# Collective test starting: all_reduce_perf\n")
    with pytest.raises(TableError, match="must list its ranks"):
        read_table("nccl-tests", tmp_path)
    row = _row("33554432 524288 double none -1", "123.25 272.25 238.22 0", "120.28 278.96 244.09 0")
    (tmp_path / "whole.log").write_text(_header("all_gather", 2, 2) + row)
    table = read_table("nccl-tests", tmp_path)
    assert table.works == (Collective("all_gather", 33554432, 4, 2),)
    assert [(reason[:43], count) for reason, count in table.skipped.items()] == [
        ("a file that cannot be read, such as " + str(tmp_path)[:7], 1)
    ]


def test_output_between_tags_and_of_other_processes_is_understood(tmp_path: Path) -> None:
    """Tags of mpirun are removed; a row that NCCL's own output cuts is left out; old logs print relative errors."""
    tag = "[1,0]<stdout>:"
    lines = _header("all_reduce", 2, 2) + (
        _row("33554432 8388608 float sum", f"123.25 272.25 408.4 5e-07{tag}", "120.28 278.96 418.4 2e-07")
        + _row("67108864 16777216 float sum -1", "240.0node:12:34 [0] NCCL INFO Channel 00/0", "1 2 3 4")
    )
    (tmp_path / "a.log").write_text("".join(f"{tag}{line}\n" for line in lines.splitlines()))
    table = read_table("nccl-tests", tmp_path / "a.log")
    assert table.seconds.tolist() == pytest.approx([120.28e-6])
    assert table.skipped == {"a row that other output interrupts": 1}


def test_a_run_that_does_not_list_all_ranks_is_left_out(tmp_path: Path) -> None:
    """The other logs of the folder are read; rows are counted."""
    row = _row("33554432 524288 double none -1", "123.25 272.25 238.22 0", "120.28 278.96 244.09 0")
    whole = _header("all_gather", 2, 2)
    for name, lost in (("a", "Rank  1"), ("b", "Rank  3"), ("c", "")):
        lines = [line for line in whole.splitlines() if not lost or lost not in line]
        (tmp_path / f"{name}.log").write_text("\n".join(lines) + "\n" + row)
    table = read_table("nccl-tests", tmp_path)
    assert table.works == (Collective("all_gather", 33554432, 4, 2),)
    assert table.skipped == {"a run whose log does not list all of its ranks": 2}


def test_version_and_environment_are_a_variant(tmp_path: Path) -> None:
    """As NCCL prints them; each run has its own."""
    row = _row("33554432 524288 double none -1", "123.25 272.25 238.22 0", "120.28 278.96 244.09 0")
    said = (
        "NCCL version 2.21.5+cuda12.4\n"
        "node-0:7:7 [0] NCCL INFO NCCL_ALGO set by environment to Ring.\n"
        "export NCCL_IB_DISABLE=1\nNCCL_DEBUG=INFO\n"
    )
    (tmp_path / "a.log").write_text(_header("all_gather", 2, 2) + said + row + _header("all_gather", 1, 4) + row)
    table = read_table("nccl-tests", tmp_path / "a.log")
    assert table.software == (
        "nccl-tests nccl 2.21.5 NCCL_ALGO=Ring NCCL_IB_DISABLE=1",
        "nccl-tests nccl 2.21.5",
    )


def test_an_archive_holds_logs(tmp_path: Path) -> None:
    """Each log on its own: one whose runs all failed is counted, and its path names the cluster."""
    row = _row("33554432 524288 double none -1", "123.25 272.25 238.22 0", "120.28 278.96 244.09 0")
    logs = {"b/cluster01/logs/a.log": _header("all_gather", 2, 2) + row, "b/logs/b.log": _header("all_gather", 2, 2)}
    with tarfile.open(tmp_path / "raw_logs.tar.gz", "w:gz") as archive:
        for name, text in logs.items():
            (tmp_path / "log").write_text(text)
            archive.add(tmp_path / "log", name)
    table = read_table("nccl-tests", tmp_path / "raw_logs.tar.gz")
    assert table.works == (Collective("all_gather", 33554432, 4, 2),)
    assert table.fabric == ("nccl-tests-cluster01",) and table.skipped == {"a log of failed runs alone": 1}
    whole = (tmp_path / "raw_logs.tar.gz").read_bytes()
    (tmp_path / "raw_logs.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableError, match="must be a whole archive"):
        read_table("nccl-tests", tmp_path / "raw_logs.tar.gz")


class TestParsed(TableReaderContract):
    format = "nccl-tests"
    place = "nccl_tests_parsed.csv.gz"
    text = (
        "collective,n_ranks,n_nodes,device,size_bytes,time_us_oop,time_us_ip,wrong_oop,wrong_ip,file\n"
        "reduce_scatter,80,10,NVIDIA H100 80GB HBM3,33554432,500.5,499.5,0,0,a/example-cluster01/logs/a.log\n"
        "alltoall,8,1,NVIDIA H100 80GB HBM3,33554432,109.18,110,0,N/A,a/example-cluster01/logs/a.log\n"
        "alltoall,8,1,NVIDIA H100 80GB HBM3,33554432,109.18,110,0,N/A,a/example-cluster01/logs/b.log\n"
        "sendrecv,8,1,NVIDIA H100 80GB HBM3,33554432,99,99,0,N/A,a/example-cluster01/logs/a.log\n"
        "sendrecv,20,10,NVIDIA H100 80GB HBM3,33554432,99,99,0,N/A,a/example-cluster01/logs/a.log\n"
    )

    def test_ranks_and_nodes(self, table: Measurements) -> None:
        """The same time in another log is another measurement; a ring over ten nodes is no message between two."""
        assert table.works == (
            Collective("reduce_scatter", 33554432, 80, 8),
            *[Collective("all_to_all", 33554432, 8, 8)] * 2,
            Collective("send_recv", 33554432, 2, 2),
        )
        assert table.fabric[:2] == ("nccl-tests-example-cluster01", "dgx-h100")
        assert table.skipped == {"a ring of messages over more than two nodes": 1}
