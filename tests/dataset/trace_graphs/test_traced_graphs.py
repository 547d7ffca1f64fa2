"""Segments go through the dataset unchanged: the program that training reads is the one that was traced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch_geometric.data import Batch, InMemoryDataset

from stepsight.dataset import TraceGraphs
from stepsight.dataset.graph.graph_table import WORK_TYPES, edge_types
from stepsight.dataset.graph.program import Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.graph.relations import CONCURRENT, RELATIONS
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import read_run
from stepsight.dataset.trace_graphs.call_segments import call_segments
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset
from stepsight.dataset.trace_graphs.learning_segments import learning_segments
from stepsight.dataset.trace_graphs.traced_graphs import segment_graphs
from stepsight.dataset.traces.import_traces import import_ranks
from tests.dataset.graph.test_program import overlapped, programs
from tests.dataset.run_folders import write_run
from tests.dataset.traced_jobs import two_ranks


def _traced(program: Program) -> TracedSegment:
    return TracedSegment(program, np.arange(1.0, len(program) + 1), program.label, 0, 1, "run")


def test_training_reads_what_the_harness_traced(tmp_path: Path) -> None:
    traced = read_run(write_run(tmp_path, 2)).segments()
    make_dataset([tmp_path], tmp_path / "data")
    found = learning_segments(TraceGraphs(tmp_path / "data").table)
    assert len(found) == len(traced) > 2
    for one, other in zip(found, traced, strict=True):
        assert one.program.digest_key == other.program.digest_key
        assert one.slot_s == pytest.approx(other.slot_s, rel=1e-5)
        for name in ("label", "rank", "busy", "run", "step", "micro_batch", "stage"):
            assert getattr(one, name) == getattr(other, name)
    assert len({id(segment.program) for segment in found}) == len({segment.program.digest_key for segment in traced})


def test_segments_alone_need_no_graphs_of_steps(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    told = make_dataset([tmp_path], tmp_path / "data", scopes=("segment",))
    assert told["step_graphs"] == 0 < told["segment_graphs"]


@settings(deadline=None, max_examples=25)
@given(programs())
def test_a_graph_holds_every_node_and_edge_once(program: Program) -> None:
    data = segment_graphs([_traced(program)]).hetero_data(0)
    node = {name: data[name].node.tolist() for name in WORK_TYPES}
    assert sorted(node["op"] + node["collective"]) == list(range(len(program)))
    assert all(isinstance(program.nodes[place].work, Op) for place in node["op"])
    found = sorted(
        (node[source][i], node[target][j])
        for source, relation, target in edge_types()
        if relation in RELATIONS and relation != CONCURRENT and {source, target} <= set(WORK_TYPES)
        for i, j in data[source, relation, target].edge_index.T.tolist()
    )
    assert found == sorted((before, after) for before, after, _ in program.all_edges())
    for source in WORK_TYPES:
        runs_on = data[source, "runs_on", "stream"].edge_index
        assert [data.streams[each] for each in runs_on[1].tolist()] == [
            program.nodes[place].stream for place in node[source]
        ]
        assert data["stream", "runs", source].edge_index.flip(0).equal(runs_on)


def test_graphs_batch() -> None:
    """The loader of PyTorch Geometric joins graphs of segments."""
    table = segment_graphs([_traced(overlapped()), _traced(overlapped())])
    batch = Batch.from_data_list([table.hetero_data(place) for place in range(2)])
    assert batch["op"].num_nodes == 6
    assert batch["op", CONCURRENT, "collective"].edge_index.tolist() == [[1, 4], [0, 1]]


def test_graphs_are_stored_as_pytorch_geometric_stores_them() -> None:
    programs_of = [overlapped(), Program((overlapped().nodes[0],), label="forward"), overlapped()]
    table = segment_graphs([_traced(program) for program in programs_of])
    data, slices = table.collated()
    expected, wanted = InMemoryDataset.collate([table.hetero_data(place) for place in range(3)])
    assert str(data.to_dict()) == str(expected.to_dict()) and slices is not None and slices.keys() == wanted.keys()
    for key, names in wanted.items():
        for name, bounds in names.items() if isinstance(names, dict) else [(None, names)]:
            assert torch.equal(bounds, slices[key] if name is None else slices[key][name])


def test_calls_of_imported_traces_are_nodes(tmp_path: Path) -> None:
    """The seconds of a collective are those of the rank that came last, and unknown if not all ranks were traced."""
    graphs = import_ranks([f.write(tmp_path / f"{place}.json") for place, f in enumerate(two_ranks())]).graphs
    segments = call_segments(graphs, "theirs")
    assert {segment.label for segment in segments} == {"forward", "backward", "optimizer"}
    assert len(segments) == 2 * 2 * 3 and sum(len(segment.program) for segment in segments) == 2 * 2 * 5
    assert max(_collectives(segments)) < 1e-3
    alone = _collectives(call_segments(graphs[:1], "theirs"))
    assert alone and np.isnan(alone).all()


def _collectives(segments: list[TracedSegment]) -> list[float]:
    return [
        float(seconds)
        for segment in segments
        for node, seconds in zip(segment.program.nodes, segment.slot_s, strict=True)
        if not isinstance(node.work, Op)
    ]


def test_a_part_of_a_dataset_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    make_dataset([tmp_path], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data")
    places = [place for place, scope in enumerate(graphs.values("scope")) if scope == "segment"][1::2]
    whole = learning_segments(graphs.table)[1::2]
    found = learning_segments(graphs[torch.tensor(places)].table)
    assert [each.program for each in found] == [each.program for each in whole]
