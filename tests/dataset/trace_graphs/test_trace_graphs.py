"""The graph dataset: every relation, features that are finite, splits that cannot leak, versions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import HeteroData

from stepsight.dataset import TraceGraphs
from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.graph.graph_table import GraphTable
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset, read_index
from stepsight.dataset.traces.import_traces import import_ranks
from tests.dataset.kineto_files import KinetoFile
from tests.dataset.traced_jobs import GpuJob, two_ranks


def add_run(folder: Path, name: str, *files: KinetoFile) -> Path:
    paths = [file.write(folder / name / f"{place}.json") for place, file in enumerate(files)]
    found = import_ranks(paths)
    write_imported(found.graphs, found.sources, folder / "col", None, found.warnings)
    return folder / "col"


def collection(folder: Path) -> Path:
    add_run(folder, "pair", *two_ranks())
    for slow in (1.0, 1.5, 2.0):
        found = add_run(folder, f"single{slow}", GpuJob(slow=slow).step(1).step(2).file)
    return found


def test_one_graph_for_each_step_and_segment(tmp_path: Path) -> None:
    told = make_dataset([collection(tmp_path)], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data")
    assert len(graphs) == told["graphs"] == told["step_graphs"] + told["segment_graphs"]
    assert told["step_graphs"] == 2 * 2 + 3 * 2 and told["segment_graphs"] == 3 * told["step_graphs"]
    assert min(count for relation, count in told["edges"].items()) > 0
    assert {graph.scope for graph in graphs} == {"step", "segment"}
    assert len(TraceGraphs(tmp_path / "data", scope="segment")) == told["segment_graphs"]
    assert told["version"] in (tmp_path / "data" / "README.md").read_text()


def test_features_and_targets(tmp_path: Path) -> None:
    make_dataset([collection(tmp_path)], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data", scope="step")
    for graph in graphs:
        for kind in ("op", "collective", "host"):
            assert torch.isfinite(graph[kind].x).all() and graph[kind].x.shape[1] == len(graphs.feature_names)
        assert graph["op"].y.shape == (graph["op"].num_nodes, 2)
        seconds = float(graph["op"].y[:, 1].exp().sum())
        assert min(abs(seconds - (1200e-6 * slow + 150e-6)) for slow in (1.0, 1.5, 2.0)) < 1e-6
        for edge_type in graph.edge_types:
            ends = graph[edge_type].edge_index
            assert graph[edge_type].edge_attr.shape == (ends.shape[1], len(graphs.edge_feature_names))
            for side, kind in zip((0, 1), (edge_type[0], edge_type[2]), strict=True):
                assert ends.numel() == 0 or int(ends[side].max()) < graph[kind].num_nodes
    assert graphs.kinds[int(graphs[0]["op"].kind[0])] == "linear"


@pytest.mark.parametrize("by", ["run", "model", "scale", "hardware", "strategy"])
def test_parts_of_a_split_share_nothing(tmp_path: Path, by: str) -> None:
    make_dataset([collection(tmp_path)], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data")
    values = {getattr(graph, by) for graph in graphs}
    if len(values) < 2:
        with pytest.raises(StepsightError, match="as many different ones"):
            graphs.split(by, (0.5, 0.5))
        return
    one, other = graphs.split(by, (0.5, 0.5))
    assert len(one) + len(other) == len(graphs) and len(one) and len(other)
    assert not {getattr(graph, by) for graph in one} & {getattr(graph, by) for graph in other}
    assert not {graph.group for graph in one} & {graph.group for graph in other}


def test_a_trace_that_was_imported_twice_is_in_one_part(tmp_path: Path) -> None:
    for place in ("a", "b"):
        add_run(tmp_path / place, f"run-{place}", GpuJob().step(1).file)
    add_run(tmp_path / "c", "other", GpuJob(slow=3.0).step(1).file)
    folders = [tmp_path / place / "col" for place in "abc"]
    make_dataset(folders, tmp_path / "data")
    parts = TraceGraphs(tmp_path / "data").split("run", (0.5, 0.5))
    assert [len({graph.group for graph in part}) for part in parts] == [1, 1]


def test_the_version_follows_the_traces(tmp_path: Path) -> None:
    first = make_dataset([collection(tmp_path)], tmp_path / "data")
    assert make_dataset([tmp_path / "col"], tmp_path / "data")["version"] == first["version"]
    add_run(tmp_path, "more", GpuJob(slow=4.0).step(1).file)
    assert make_dataset([tmp_path / "col"], tmp_path / "data")["version"] != first["version"]


def test_graphs_round_trip_through_parquet(tmp_path: Path) -> None:
    make_dataset([collection(tmp_path)], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data")
    (tmp_path / "tables").mkdir()
    graphs.table.save(tmp_path / "tables")
    table = GraphTable.load(tmp_path / "tables")
    again = [table.hetero_data(place) for place in range(len(table))]
    assert len(again) == len(graphs)
    for one, other in zip(graphs, again, strict=True):
        assert one.metadata() == other.metadata() and (one.run, one.step, one.segment) == (
            other.run,
            other.step,
            other.segment,
        )
        for kind in ("op", "collective", "host"):
            assert torch.equal(one[kind].x, other[kind].x) and torch.equal(one[kind].kind, other[kind].kind)
            assert torch.equal(one[kind].y.nan_to_num(9.0), other[kind].y.nan_to_num(9.0))
        for edge_type in one.edge_types:
            assert torch.equal(one[edge_type].edge_index, other[edge_type].edge_index)
            assert torch.equal(one[edge_type].edge_attr, other[edge_type].edge_attr)


class Evil:
    """Fails the test if somebody unpickles it."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a file was unpickled",)


def test_nothing_in_a_folder_runs(tmp_path: Path) -> None:
    """Planted pickles stay unread, those that PyTorch Geometric would open too, and an earlier form is refused."""
    make_dataset([collection(tmp_path)], tmp_path / "data")
    whole = len(TraceGraphs(tmp_path / "data"))
    for name in (
        "pre_transform.pt",
        "pre_filter.pt",
        "graphs.pt",
        f"graphs-{read_index(tmp_path / 'data')['version']}.pt",
    ):
        for folder in (tmp_path / "data", tmp_path / "data" / "processed", tmp_path / "old" / "processed"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(pickle.dumps(Evil()))
    assert len(TraceGraphs(tmp_path / "data", transform=lambda graph: graph)) == whole
    (tmp_path / "old" / "raw").mkdir()
    (tmp_path / "old" / "raw" / "runs.json").write_text('{"form": 4}')
    with pytest.raises(TraceError, match="stepsight dataset"):
        TraceGraphs(tmp_path / "old")
    make_dataset([tmp_path / "col"], tmp_path / "old")  # takes its place
    assert len(TraceGraphs(tmp_path / "old")) == whole


def test_broken_tables_are_refused(tmp_path: Path) -> None:
    make_dataset([collection(tmp_path)], tmp_path / "data")
    table = GraphTable.load(tmp_path / "data")
    table.rows["op", "stream_order", "op"]["ends"][0] = 10**6
    table.save(tmp_path / "data")
    with pytest.raises(TraceError, match="edges must lead to nodes of their graph"):
        TraceGraphs(tmp_path / "data")


def test_filters_and_transforms_apply(tmp_path: Path) -> None:
    make_dataset([collection(tmp_path)], tmp_path / "data")
    steps = TraceGraphs(tmp_path / "data", pre_filter=lambda graph: graph.scope == "step")
    assert set(steps.values("scope")) == {"step"} and len(steps) == len(TraceGraphs(tmp_path / "data", scope="step"))
    assert all(graph.num_edges == 0 for graph in TraceGraphs(tmp_path / "data", pre_transform=_without_edges))


def _without_edges(graph: HeteroData) -> HeteroData:
    return graph.edge_type_subgraph([])


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(TraceError, match="choose another"):
        make_dataset([collection(tmp_path)], tmp_path / "mine")
    with pytest.raises(TraceError, match="stepsight dataset"):
        TraceGraphs(tmp_path / "mine")


def many_ops(first: int, last: int, seed: int) -> KinetoFile:
    """Steps of twelve ops each, which last as long as the numbers of the step and of the seed say."""
    file = KinetoFile()
    for step in range(first, last):
        begin = 10_000.0 * (step + 1)
        file.note(f"ProfilerStep#{step}", begin, 9_000)
        for place in range(12):
            start, length = begin + 10 + 700.0 * place, 50.0 + (37 * place + 101 * step + 13 * seed) % 499
            file.call("aten::gelu", start, length, [4, 6 + place])
    return file


def test_two_excerpts_of_one_trace_are_in_one_part(tmp_path: Path) -> None:
    """No digest of a graph occurs on both sides of a split, whatever it goes by."""
    for name, file in {"whole": many_ops(0, 3, 1), "excerpt": many_ops(1, 2, 1), "other": many_ops(0, 2, 5)}.items():
        add_run(tmp_path, name, file)
    make_dataset([tmp_path / "col"], tmp_path / "data")
    graphs = TraceGraphs(tmp_path / "data")
    assert len(set(graphs.values("group"))) == 3
    digests = [each for each in graphs.values("digest") if each]
    assert len(set(digests)) < len(digests)
    for seed in range(4):
        one, other = graphs.split("run", (0.5, 0.5), seed=seed)
        assert not {graph.digest for graph in one} & {graph.digest for graph in other} - {""}
        assert {len({graph.run for graph in part}) for part in (one, other)} == {1, 2}


@pytest.mark.parametrize("file", ["graphs.parquet", "nodes.op.parquet", "edges.op.data.op.parquet"])
def test_null_cells_are_refused(tmp_path: Path, file: str) -> None:
    """Every column but the targets must be known throughout; the error names one that is not."""
    data = tmp_path / "data"
    make_dataset([collection(tmp_path)], data)
    whole = pq.read_table(data / file)
    for place, name in enumerate(whole.column_names):
        if not name.startswith("log_seconds"):
            cells = whole.column(name).to_pylist()
            broken = pa.array([None, *cells[1:]], whole.schema.field(name).type)
            pq.write_table(whole.set_column(place, name, broken), data / file)
            with pytest.raises(TraceError, match=name):
                TraceGraphs(data)
    pq.write_table(whole, data / file)
    assert len(TraceGraphs(data))
