import numpy as np

from stepsight.dataset.graph.program import Dependency, ProgramBuilder
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.node_features import RELATIONS, SegmentGraph, join, node_feature_names, node_features, topology

HARDWARE = find_hardware("local-cpu")
assert HARDWARE is not None


def _overlapping() -> ProgramBuilder:
    """op0 -> op1 -> op2 on compute; a collective after op0 that op2 waits for."""
    builder = ProgramBuilder("backward")
    first = builder.add(Op("add", (1000,), "fp32"))
    reduce = builder.add(Collective("all_reduce", 4000, 2, 2), "dp", after=[first], why=Dependency.SYNCHRONISATION)
    builder.add(Op("add", (1000,), "fp32"))
    builder.add(Op("add", (1000,), "fp32"), after=[reduce], why=Dependency.SYNCHRONISATION)
    return builder


def test_relations_are_those_of_the_program() -> None:
    graph = topology(_overlapping().build())
    assert set(graph.edges) == set(RELATIONS)
    assert graph.edges["stream_order"].T.tolist() == [[0, 2], [2, 3]]
    assert graph.edges["synchronisation"].T.tolist() == [[0, 1], [1, 3]]
    assert sorted(graph.edges["may_run_concurrently"].T.tolist()) == [[1, 2], [2, 1]]
    assert graph.stream.tolist() == [0, 1, 0, 0]


def test_features_are_finite_and_named() -> None:
    program = _overlapping().build()
    features = node_features(SegmentGraph(program, HARDWARE, 2), np.array([1e-6, 1e-2, 1e-6, 1e-6]))
    assert features.shape == (4, len(node_feature_names()))
    assert np.isfinite(features).all()
    assert np.abs(features).max() < 10
    assert len(set(node_feature_names())) == len(node_feature_names())


def test_joining_keeps_programs_apart() -> None:
    one = topology(_overlapping().build())
    joined = join([one, one])
    assert joined.num_nodes == 8
    assert joined.edges["synchronisation"].T.tolist() == [[0, 1], [1, 3], [4, 5], [5, 7]]
    assert joined.stream.tolist() == [0, 1, 0, 0, 2, 3, 2, 2]


def test_an_empty_program_has_empty_arrays() -> None:
    program = ProgramBuilder("forward").build()
    assert node_features(SegmentGraph(program, HARDWARE, 1), np.zeros(0)).shape == (0, len(node_feature_names()))
    assert topology(program).num_nodes == 0
