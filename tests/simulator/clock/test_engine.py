import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepsight.simulator.clock.engine import add_path, longest_paths

NATIVE = longest_paths.compile()


def run(
    seconds: list[float], edges: list[list[int]], ready: list[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    pointer = np.cumsum([0, *map(len, edges)]).astype(np.int32)
    before = np.array([need for needs in edges for need in needs], dtype=np.int32)
    finish, critical = np.empty(len(seconds)), np.empty(len(seconds), dtype=np.int32)
    starts = np.zeros(len(seconds)) if ready is None else np.array(ready)
    longest_paths(np.array(seconds), pointer, before, starts, finish, critical)
    return finish, critical


def test_a_node_waits_for_the_latest_of_its_dependencies() -> None:
    finish, critical = run([1.0, 3.0, 2.0, 1.0], [[], [], [0], [1, 2]])
    assert finish.tolist() == [1.0, 3.0, 3.0, 4.0]
    assert critical.tolist() == [-1, -1, 0, 1]  # a tie goes to the first that is listed


def test_nodes_that_nothing_ready_leads_to_never_finish() -> None:
    finish, _ = run([1.0, 1.0, 1.0], [[], [], [1]], [-np.inf, 0.0, -np.inf])
    assert finish.tolist() == [-np.inf, 1.0, 2.0]


def test_paths_add_up() -> None:
    seconds = [1.0, 3.0, 2.0, 1.0]
    finish, critical = run(seconds, [[], [], [0], [1, 2]])
    counts = np.zeros(2)
    add_path(critical, 3, np.array([0, 1, 0, 1], dtype=np.int32), np.ones(4), 2.0, counts)
    assert counts.tolist() == [0.0, 4.0]
    assert finish[3] == 4.0


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    seconds = draw(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=30))
    edges = [draw(st.lists(st.integers(0, node - 1), max_size=3)) if node else [] for node in range(len(seconds))]
    return seconds, edges


@given(graphs())
def test_every_dependency_holds_and_something_is_critical(graph: tuple[list[float], list[list[int]]]) -> None:
    seconds, edges = graph
    finish, critical = run(seconds, edges)
    for node, needs in enumerate(edges):
        start = finish[node] - seconds[node]
        assert all(finish[need] <= start + 1e-9 for need in needs)
        assert critical[node] in (*needs, -1)
        assert abs(start - (finish[critical[node]] if critical[node] >= 0 else 0.0)) < 1e-9


@given(graphs(), st.data())
def test_a_longer_node_never_ends_earlier(graph: tuple[list[float], list[list[int]]], data: st.DataObject) -> None:
    seconds, edges = graph
    slower = list(seconds)
    slower[data.draw(st.integers(0, len(seconds) - 1))] += 1.0
    assert (run(slower, edges)[0] >= run(seconds, edges)[0] - 1e-12).all()


@given(graphs())
def test_compiled_and_interpreted_agree(graph: tuple[list[float], list[list[int]]]) -> None:
    seconds, edges = graph
    results = []
    for kernel in (longest_paths.function, NATIVE):
        pointer = np.cumsum([0, *map(len, edges)]).astype(np.int32)
        before = np.array([need for needs in edges for need in needs], dtype=np.int32)
        finish, critical = np.empty(len(seconds)), np.empty(len(seconds), dtype=np.int32)
        kernel(np.array(seconds), pointer, before, np.zeros(len(seconds)), finish, critical)
        results.append((finish.tolist(), critical.tolist()))
    assert results[0] == results[1]
