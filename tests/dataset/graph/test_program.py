"""Programs are in issue order; stream order is implied."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsight.dataset.base.errors import StepsightError, TraceError
from stepsight.dataset.graph.program import Dependency, Node, Program, ProgramBuilder
from stepsight.dataset.graph.relations import RELATIONS, concurrent_pairs, relation_pairs
from stepsight.dataset.kinds.op import Collective, Op

ADD = Op("add", (4,), "fp32")


def test_all_edges() -> None:
    """Nodes of one stream follow each other; explicit edges come on top."""
    builder = ProgramBuilder("forward")
    first = builder.add(ADD)
    builder.add(ADD, "tp")
    builder.add(ADD)
    last = builder.add(ADD, "tp", after=[first], why=Dependency.SYNCHRONISATION)
    program = builder.build()
    assert set(program.all_edges()) == {
        (0, 2, Dependency.STREAM_ORDER),
        (1, 3, Dependency.STREAM_ORDER),
        (0, 3, Dependency.SYNCHRONISATION),
    }
    assert program.streams == ("compute", "tp") and last == 3 and len(program) == 4


def test_only_earlier_nodes_are_waited_for() -> None:
    """An edge against issue order, which could close a cycle, is refused."""
    node = ProgramBuilder()
    node.add(ADD)
    with pytest.raises(ValueError, match="earlier to a later"):
        Program(node.build().nodes, ((0, 0, Dependency.DATA),))


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


@settings(deadline=None, max_examples=20)
@given(program=programs())
def test_a_saved_program_is_loaded_unchanged(tmp_path_factory: pytest.TempPathFactory, program: Program) -> None:
    """Nodes, edges, and what they make as columns are the same from either face."""
    path = tmp_path_factory.mktemp("saved") / "new" / "forward"
    program.save(path)
    again = Program.load(path)
    assert again == program and again.digest_key == program.digest_key and again.part([0], "") == program.part([0], "")
    assert all(np.array_equal(again.columns[name], values) for name, values in program.columns.items())
    with pytest.raises(TypeError, match="a program has no colour"):
        program.replace(colour="red")


def test_a_number_that_no_column_holds_is_refused(tmp_path: Path) -> None:
    builder = ProgramBuilder("forward")
    builder.add(ADD)
    builder.build().save(tmp_path / "forward")
    path = tmp_path / "forward.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"steps_s": [[0, 10**400]]}), "utf-8")
    with pytest.raises(TraceError, match=r"forward\.json must be an imported graph"):
        Program.load(tmp_path / "forward")


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


def test_an_overlapped_collective_may_run_beside_what_does_not_wait_for_it() -> None:
    assert concurrent_pairs(overlapped()).T.tolist() == [[1, 2], [2, 1]]


def test_relations_are_complete() -> None:
    assert set(relation_pairs(overlapped())) == set(RELATIONS)


def test_importing_graphs_does_not_import_torch() -> None:
    code = "import sys; import stepsight.dataset.graph.program; print({'torch', 'pandas'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_edits_keep_what_waits() -> None:
    """A changed node keeps its edges; what waited for a removed node waits for its sources; a new one is in order."""
    program = overlapped()
    moved = program.change([2], stream="other").change([1], work=ADD)
    assert [node.stream for node in moved.nodes] == ["compute", "dp", "other", "compute"] and moved.nodes[1].work == ADD
    assert moved.edges == program.edges and (0, 3, Dependency.STREAM_ORDER) in set(moved.all_edges())
    fewer = program.remove([1])
    assert fewer.nodes == (program.nodes[0], *program.nodes[2:])
    assert fewer.edges == ((0, 2, Dependency.SYNCHRONISATION),)
    more = program.insert(1, REDUCE, "tp", "new", after=[0])
    assert more.nodes[1].name == "new" and more.remove([1]) == program
    assert (0, 1, Dependency.DATA) in more.edges and more.columns["phase"].tolist() == [1] * 5
    with pytest.raises(StepsightError, match="after all nodes that it waits for"):
        program.insert(0, ADD, after=[1])
    with pytest.raises(StepsightError, match="nodes must be whole numbers from 0 to"):
        program.remove([4])
    with pytest.raises(StepsightError, match="edges must join nodes from 0 to 3"):
        program.with_edges([0], [4], Dependency.DATA, 0.0)
    with pytest.raises(StepsightError, match="edges must join nodes from 0 to 3"):
        program.with_edges([-1], [2], Dependency.DATA, 0.0)
    for nodes in ([1.5], [True], ["1"], 1.5, [-1], np.array([True, False, True, False])):
        with pytest.raises(StepsightError, match="nodes must be whole numbers from 0 to 3, got"):
            program.remove(nodes)  # type: ignore[arg-type]
    with pytest.raises(StepsightError, match="work of a node must be an Op or a Collective, got 'linear'"):
        program.change([1], work="linear")  # type: ignore[arg-type]
    with pytest.raises(StepsightError, match="stream of a node must be a text, got 3"):
        program.insert(1, ADD, stream=3)  # type: ignore[arg-type]
    with pytest.raises(StepsightError, match="place must be a whole number from 0 to 4"):
        program.insert(1.0, ADD)  # type: ignore[arg-type]


@given(programs(), st.data())
def test_the_nodes_that_stay_wait_for_the_same_nodes_as_before(program: Program, data: st.DataObject) -> None:
    """Waits stay that led through a removed node, by its edges and by the order of its stream."""
    gone = data.draw(st.sets(st.integers(0, len(program) - 1)))
    kept = [node for node in range(len(program)) if node not in gone]
    fewer = program.remove(gone)
    assert fewer.nodes == tuple(program.nodes[node] for node in kept)
    assert np.array_equal(reachable(fewer), reachable(program)[np.ix_(kept, kept)])


def test_a_step_is_its_nodes_and_the_edges_among_them() -> None:
    program = overlapped()
    two = Program.of_parts([program, program]).with_edges([3], [4], Dependency.DATA, 0.0)
    two = two.replace(columns={**two.columns, "step": np.array([0, 0, 0, 0, 1, 1, 1, -1])})
    assert two.of_step(0).nodes == program.nodes and two.of_step(0).edges == program.edges
    assert two.of_step(1).nodes == program.nodes[:3] and two.of_step(1).edges == program.edges[:1]


def test_nodes_are_fused_and_others_move_out_of_their_way() -> None:
    ops = [Node(ADD, "dp" if name == "c" else "compute", name) for name in "abcd"]
    program = Program(ops, [(0, 2, Dependency.DATA)], "forward").replace(duration_s=np.array([1.0, 2.0, 4.0, 8.0]))
    fused = program.fuse([0, 1, 3], REDUCE, "abd")
    assert [(node.work, node.name) for node in fused.nodes] == [(REDUCE, "abd"), (ADD, "c")]
    assert fused.edges == ((0, 1, Dependency.DATA),) and fused.duration_s.tolist() == [11.0, 4.0]
    assert fused.columns["kind"].tolist() == [1, 0] and program.fuse([1], ADD).nodes == program.nodes
    with pytest.raises(StepsightError, match="must not wait for each other by another, got node 1"):
        program.fuse([0, 3], ADD)  # the order of their stream
    for nodes, work in (([], ADD), ([0, 2], ADD), ([0], None)):
        with pytest.raises(StepsightError, match="nodes of one stream must be fused, into an Op or a Collective, got"):
            program.fuse(nodes, work)  # type: ignore[arg-type]


@given(programs(), st.data())
def test_a_fused_node_waits_for_all_and_all_for_it(program: Program, data: st.DataObject) -> None:
    """Nodes reach each other as before, or through the fused node; it is refused only where that would be a circle."""
    listed = [Node(node.work, node.stream, str(place)) for place, node in enumerate(program.nodes)]
    named = Program(listed, program.edges)
    stream = data.draw(st.sampled_from(program.columns["stream"].tolist()))
    own = np.flatnonzero(program.columns["stream"] == stream).tolist()
    chosen = sorted(data.draw(st.sets(st.sampled_from(own), min_size=1)))
    before = reachable(program)
    into, out = before[:, chosen].any(axis=1), before[chosen].any(axis=0)
    outside = np.setdiff1d(np.arange(len(program)), chosen)
    if (into & out)[outside].any():
        with pytest.raises(StepsightError, match="by another"):
            named.fuse(chosen, ADD)
        return
    fused = named.fuse(chosen, ADD, "fused")
    place = {node.name: at for at, node in enumerate(fused.nodes)}
    kept = [place[str(node)] for node in outside]
    after = reachable(fused)
    assert np.array_equal(after[kept, place["fused"]], into[outside])
    assert np.array_equal(after[place["fused"], kept], out[outside])
    through = before | np.outer(into, out)
    assert np.array_equal(after[np.ix_(kept, kept)], through[np.ix_(outside, outside)])


@settings(deadline=None, max_examples=25)
@given(programs(), programs())
def test_parts_follow_each_other(one: Program, other: Program) -> None:
    both = Program.of_parts([one, other, one])
    assert both.nodes == (*one.nodes, *other.nodes, *one.nodes) and both.part(range(len(one)), "") == one
    last = range(len(one) + len(other), len(both))
    assert both.part(last, "") == one and set(both.all_edges()) >= set(one.all_edges())


def test_a_program_becomes_a_graph_for_pytorch_geometric() -> None:
    data = overlapped().to_heterodata(np.full(4, 2e-3))
    assert data["op"].node.tolist() == [0, 2, 3] and data["op"].y[:, 0].exp().numpy() == pytest.approx(2e-3)
    assert data["op"].y[:, 1].isnan().all() and data.segment == "backward"
