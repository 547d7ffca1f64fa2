"""Chakra execution traces become the graph that replay walks; what is none is refused with the reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.graph.rank_trace import meetings
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.traces.chakra_graph import read_nodes
from stepsight.dataset.traces.import_traces import import_ranks, summary
from stepsight.simulator.replay.replay import replay
from tests.dataset.chakra_files import jsonized, protobuf, two_products, workload, write_ranks


def test_one_rank_is_walked_in_closed_form(tmp_path: Path) -> None:
    (path,) = write_ranks(tmp_path, (1,))
    found = import_ranks([path], form="chakra")
    told, replayed = summary(found), replay(found.graphs)
    # call 10, product 100, all-reduce 50, wait 1, call 10, product 100: measured from the first work on the device
    assert replayed.measured_s == pytest.approx(261e-6) and abs(replayed.error_percent) < 1e-9
    assert told["recognised_percent"] == 100 and told["dependencies"]["launch"] == 3
    assert told["dependencies"]["synchronisation"] == 1 and told["dependencies"]["data"] == 1
    assert [work.dims for work in found.graphs[0].works if isinstance(work, Op)] == [(512, 128, 256)]


@pytest.mark.parametrize("form", ["protobuf", "jsonized", "workload"])
def test_every_form_is_the_same_graph(form: str, tmp_path: Path) -> None:
    text = jsonized(two_products()) if form == "jsonized" else workload(two_products())
    path = tmp_path / f"chakra.0.{'et' if form == 'protobuf' else 'json'}"
    path.write_bytes(protobuf(two_products()) if form == "protobuf" else text.encode())
    graph = import_ranks([path], form="chakra").graphs[0]
    assert replay([graph]).measured_s == pytest.approx(261e-6) and len(graph) == 7


def test_ranks_meet_and_the_slow_one_decides(tmp_path: Path) -> None:
    found = import_ranks(write_ranks(tmp_path, (1, 3)), form="chakra")
    assert len(meetings(found.graphs)[0]) == 1 and found.graphs[0].world_size == 2
    replayed = replay(found.graphs)
    assert replayed.measured_s == pytest.approx(661e-6) and abs(replayed.error_percent) < 1e-6
    assert {work.group_size for work in found.graphs[0].works if isinstance(work, Collective)} == {2}


def test_messages_round_a_ring_are_walked(tmp_path: Path) -> None:
    paths = []
    for rank in range(3):
        send = {"comm_dst": (rank + 1) % 3, "comm_tag": 0, "comm_size": 4096}
        receive = {"comm_src": (rank + 2) % 3, "comm_tag": 0, "comm_size": 4096}
        nodes = [
            {"id": 1, "name": "send", "type": 5, "us": 10 + 40 * rank, "deps": [], "attrs": send},
            {"id": 2, "name": "receive", "type": 6, "us": 10, "deps": [1], "attrs": receive},
        ]
        paths.append(tmp_path / f"chakra.{rank}.et")
        paths[-1].write_bytes(protobuf(nodes))
    found = import_ranks(paths, form="chakra")
    # the message of rank 2 takes 90: rank 0 receives it then, the others after their own
    assert [float(graph.end_s.max()) for graph in found.graphs] == pytest.approx([90e-6, 60e-6, 100e-6])
    assert abs(replay(found.graphs).error_percent) < 1e-6


def test_bad_traces_are_refused_with_the_reason(tmp_path: Path) -> None:
    def refused(data: bytes | str, match: str, name: str = "chakra.0.et") -> None:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        with pytest.raises(TraceError, match=match):
            import_ranks([path], form="chakra")

    whole = protobuf(two_products())
    refused(whole[:-30], "whole Chakra execution trace")
    refused(b"PK\x03\x04 something else entirely", "whole Chakra execution trace")
    refused('{"traceEvents": [{"ph": "X"}]}', "must be a node", "chakra.0.json")
    refused(workload([{**two_products()[0], "us": -5}]), "a duration must be from 0", "chakra.0.json")
    refused(protobuf([*two_products(), two_products()[0]]), "an id of its own")
    circle = two_products()
    circle[0]["deps"] = [8]
    refused(protobuf(circle), "must not form a circle, got nodes 2, 3")
    refused(b"", "must hold nodes")
    refused(f'{{"workload_graph": {"[" * 10**5}', r"JSON\): it is nested thousands deep$", "chakra.0.json")


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    paths = write_ranks(tmp_path, (1, 1))
    twice = tmp_path / "more" / "other.1.et"
    twice.parent.mkdir()
    twice.write_bytes(paths[1].read_bytes())
    with pytest.raises(TraceError, match="rank 1 twice"):
        import_ranks([*paths, twice], form="chakra")


def test_dependencies_on_absent_nodes_are_told(tmp_path: Path) -> None:
    nodes = two_products()
    nodes[0]["deps"] = [99]
    (tmp_path / "chakra.0.et").write_bytes(protobuf(nodes))
    assert any(
        "does not hold: 1" in warning for warning in import_ranks([tmp_path / "chakra.0.et"], form="chakra").warnings
    )


def test_a_node_may_wait_for_all_others(tmp_path: Path) -> None:
    """Reading its dependencies takes a time that grows with their number, not with the square of it."""
    node, begun = {**two_products()[0], "deps": list(range(1, 200_001))}, time.process_time()
    (tmp_path / "chakra.0.et").write_bytes(protobuf([node]))
    (read,) = read_nodes(tmp_path / "chakra.0.et")
    assert read.data_deps == tuple(range(1, 200_001)) and time.process_time() - begun < 5
