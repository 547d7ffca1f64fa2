"""The collection in ``examples/`` is real, small, and says nothing about the machine's owner."""

import gzip
import re
import tomllib
from pathlib import Path

import pytest
import torch

from stepsight.dataset import TraceGraphs
from stepsight.dataset.trace_graphs.graph_dataset import make_dataset

ROOT = Path(__file__).parents[2]
COLLECTION = ROOT / "examples" / "collection"


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> TraceGraphs:
    folder = tmp_path_factory.mktemp("dataset") / "graphs"
    told = make_dataset([COLLECTION], folder)
    (mixed,) = [text for text in told["warnings"] if "mixed" in text]
    assert mixed.count("-dp") == 2  # the compiled runs
    (slowed,) = [text for text in told["warnings"] if "slowed by" in text]  # once, not for each of its runs
    assert slowed.startswith("runs ")
    return TraceGraphs(folder)


def test_it_holds_every_strategy_eager_and_compiled(graphs: TraceGraphs) -> None:
    names = " ".join(sorted({str(run) for run in graphs.values("run")}))
    for strategy in ("pp1-dp1", "pp1-dp2-", "dp2z3", "tp2-", "tp2sp", "pp2-1f1b"):
        assert strategy in names
    assert set(graphs.values("role")) == {"train", "heldout", "compiled"}
    assert not any(graphs.values("observed"))


def test_it_teaches_ops_in_context(graphs: TraceGraphs) -> None:
    known = torch.cat([graph["op"].y for graph in graphs]).isfinite().all(dim=1)
    assert known.float().mean() > 0.9


@pytest.mark.parametrize("scope", ["step", "segment"])
def test_data_of_collectives_are_edges(graphs: TraceGraphs, scope: str) -> None:
    """An all-reduce of a layer reads what an op wrote, and an op reads what it wrote; the loss has calls of no op."""
    sums = graphs.kinds.index("all_reduce")
    for graph in graphs:
        if graph.scope != scope or "-tp2-" not in graph.run or graph.segment == "optimizer":
            continue
        own = set(((graph["collective"].kind == sums) & (graph["collective"].node >= 0)).nonzero()[:, 0].tolist())
        written = own & set(graph["op", "data", "collective"].edge_index[1].tolist())
        read = own & set(graph["collective", "data", "op"].edge_index[0].tolist())
        assert min(len(written), len(read)) >= 0.7 * len(own) > 0, graph.segment


def test_reuse_distances_grow_with_what_lies_between(graphs: TraceGraphs) -> None:
    edge = next(graph for graph in graphs if graph.scope == "step")["op", "data", "op"]
    column = graphs.edge_feature_names.index
    since, distance = edge.edge_attr[:, column("log_bytes_since")], edge.edge_attr[:, column("distance")]
    assert (since[distance == 1] == 0).all() and (since[distance > 1] > 0).all()
    assert (edge.edge_attr[:, column("log_bytes")] > 0).any()


def test_it_is_small_and_names_no_host_and_no_path() -> None:
    files = [path for path in COLLECTION.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5e6
    for path in files:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        assert set(re.findall(r'"host_name": "([^"]*)"', text)) <= {"localhost"}
        assert not re.search(r'"/(home|root|work|tmp|usr)/', text)


def test_it_is_not_in_the_wheel() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert not any("examples" in name for name in (*setup["packages"], *setup["package-dir"].values()))
