"""Libraries' names of collectives come from the records, also of kinds that are registered later."""

from pathlib import Path

import pytest

from stepsight.dataset.kinds import (
    COLLECTIVE_KINDS,
    CollectiveKind,
    benchmark_names,
    c10d_calls,
    gloo_spans,
    nccl_names,
)
from stepsight.dataset.tables import read_table

GATHER = CollectiveKind(
    name="gather",
    counts="the gathered output",
    nccl_names={"gather": "Out"},
    c10d_calls={"c10d::gather_": 0},
    gloo_spans=("gather",),
    test_names=("gather",),
)


def test_every_name_means_one_kind() -> None:
    for kind in COLLECTIVE_KINDS.values():
        assert {nccl_names()[name] for name in kind.nccl_names} == {(kind.name, s) for s in kind.nccl_names.values()}
        assert all(c10d_calls()[name] == (kind.name, index) for name, index in kind.c10d_calls.items())
        assert all(benchmark_names()[name] == kind.name for name in kind.test_names)


def test_a_message_is_carried_by_the_span_of_its_direction() -> None:
    assert gloo_spans("send") == ("send",)
    assert gloo_spans("reduce_scatter")[-1] == "all_reduce"


def test_a_registered_collective_is_read() -> None:
    assert "gather" not in nccl_names()
    with COLLECTIVE_KINDS.registered("gather", GATHER):
        assert nccl_names()["gather"] == ("gather", "Out")
        assert c10d_calls()["c10d::gather_"] == ("gather", 0)
        assert benchmark_names()["gather"] == "gather" and gloo_spans("gather") == ("gather",)
    assert "gather" not in nccl_names()


def test_its_rows_of_a_table_are_measurements(tmp_path: Path) -> None:
    header = "collective,n_ranks,n_nodes,device,size_bytes,time_us_oop,time_us_ip"
    path = tmp_path / "gather.csv"
    path.write_text(f"{header}\ngather,8,1,h100,1048576,50,50\n")
    assert len(read_table("nccl-tests", path)) == 0
    with COLLECTIVE_KINDS.registered("gather", GATHER):
        (work,) = read_table("nccl-tests", path).works
        assert work.kind == "gather"
        with pytest.raises(ValueError, match="got"):
            type(work)("gather", 8, 1, 1)
