from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsight.dataset.graph_data import (
    CONCURRENT,
    RELATIONS,
    WORK_TYPES,
    concurrent_pairs,
    edge_types,
    relation_pairs,
    to_hetero,
)
from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import Dependency, Program, ProgramBuilder

ADD, REDUCE = Op("add", (8,), "fp32"), Collective("all_reduce", 32, 2, 2)
EXPLICIT = [why for why in Dependency if why is not Dependency.STREAM_ORDER]


def overlapped() -> Program:
    """Three ops; a collective after the first that the third waits for."""
    builder = ProgramBuilder("backward")
    first = builder.add(ADD)
    sent = builder.add(REDUCE, "dp", after=[first], why=Dependency.SYNCHRONISATION)
    builder.add(ADD)
    builder.add(ADD, after=[sent], why=Dependency.SYNCHRONISATION)
    return builder.build()


@st.composite
def programs(draw: st.DrawFn) -> Program:
    builder = ProgramBuilder()
    for index in range(draw(st.integers(1, 14))):
        stream = draw(st.sampled_from(("compute", "tp", "dp")))
        after = draw(st.lists(st.integers(0, index - 1), max_size=2, unique=True)) if index else []
        builder.add(ADD if stream == "compute" else REDUCE, stream, after=after, why=draw(st.sampled_from(EXPLICIT)))
    return builder.build()


def reachable(program: Program) -> np.ndarray:
    """``[i, j]``: j has to wait for i; by repeated squaring, slowly and surely."""
    reach = np.eye(len(program), dtype=bool)
    for before, after, _ in program.all_edges():
        reach[before, after] = True
    for _ in range(5):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    return reach


@given(programs())
def test_may_run_concurrently_is_neither_precedes_the_other(program: Program) -> None:
    reach = reachable(program)
    expected = {
        (i, j)
        for i, first in enumerate(program.nodes)
        for j, second in enumerate(program.nodes)
        if first.stream != second.stream and not reach[i, j] and not reach[j, i]
    }
    assert set(map(tuple, concurrent_pairs(program, 1000).T.tolist())) == expected


@given(programs(), st.integers(1, 4))
def test_capped_pairs_are_a_symmetric_part_of_all(program: Program, cap: int) -> None:
    every = set(map(tuple, concurrent_pairs(program, 1000).T.tolist()))
    some = set(map(tuple, concurrent_pairs(program, cap).T.tolist()))
    assert some <= every and some == {(j, i) for i, j in some}
    assert {i for i, _ in some} == {i for i, _ in every}, "a node with a partner keeps one"


@settings(deadline=None, max_examples=25)
@given(programs())
def test_a_graph_holds_every_node_and_edge_once(program: Program) -> None:
    data = to_hetero(program)
    index = {name: data[name].index.tolist() for name in WORK_TYPES}
    assert sorted(index["op"] + index["collective"]) == list(range(len(program)))
    assert all(isinstance(program.nodes[i].work, Op) for i in index["op"])
    found = sorted(
        (index[source][i], index[target][j], relation)
        for source, relation, target in edge_types()
        if relation in RELATIONS and relation != CONCURRENT
        for i, j in data[source, relation, target].edge_index.T.tolist()
    )
    assert found == sorted((before, after, why.value) for before, after, why in program.all_edges())
    for source in WORK_TYPES:
        runs_on = data[source, "runs_on", "stream"].edge_index
        names = [data["stream"].names[stream] for stream in runs_on[1].tolist()]
        assert names == [program.nodes[i].stream for i in index[source]]
        assert data["stream", "runs", source].edge_index.flip(0).equal(runs_on)


def test_an_overlapped_collective_may_run_beside_what_does_not_wait_for_it() -> None:
    assert concurrent_pairs(overlapped()).T.tolist() == [[1, 2], [2, 1]]


def test_every_graph_has_every_type() -> None:
    data = to_hetero(Program((), label="empty"))
    assert data.edge_types == edge_types() and set(data.node_types) == {"op", "collective", "stream"}
    assert all(store.edge_index.shape == (2, 0) for store in data.edge_stores)
    data.validate()


def test_graphs_batch() -> None:
    """The loader of PyTorch Geometric joins graphs of segments."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Batch

    batch = Batch.from_data_list([to_hetero(overlapped()), to_hetero(overlapped())])
    assert batch["op"].num_nodes == 6
    assert batch["op", CONCURRENT, "collective"].edge_index.tolist() == [[1, 4], [0, 1]]


def test_relations_are_complete() -> None:
    assert set(relation_pairs(overlapped())) == set(RELATIONS)


def test_importing_graphs_does_not_import_torch() -> None:
    code = "import sys; from stepsight.dataset import graph_data; print({'torch', 'pandas'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
