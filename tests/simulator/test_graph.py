import numpy as np

from stepsight.dataset.op import Collective, Op
from stepsight.dataset.program import ProgramBuilder
from stepsight.simulator.graph import COMPUTE, DATA_PARALLEL, Segment, join

ADD, GELU, REDUCE = Op("add", (8,), "fp32"), Op("gelu", (8,), "fp32"), Collective("all_reduce", 32, 2, 2)


def segment(label: str) -> Segment:
    builder = ProgramBuilder(label)
    first = builder.add(ADD)
    sent = builder.add(REDUCE, "dp", after=[first])
    builder.add(REDUCE, after=[first], share=0.5)  # the edge repeats stream order
    builder.add(GELU, after=[sent])
    return Segment(builder.build())


def test_arrays_of_a_program() -> None:
    graph = segment("backward").graph
    assert segment("backward").works == (ADD, REDUCE, GELU)
    assert graph.work.tolist() == [0, 1, 1, 2]
    assert graph.share.tolist() == [1.0, 1.0, 0.5, 1.0]
    assert graph.kind.tolist() == [COMPUTE, DATA_PARALLEL, DATA_PARALLEL, COMPUTE]
    assert graph.pointer.tolist() == [0, 0, 1, 2, 4]
    assert graph.before.tolist() == [0, 0, 2, 1]
    assert graph.ready[1].tolist() == [-np.inf, 0.0, -np.inf, -np.inf]


def test_joined_programs_keep_apart() -> None:
    graph = join([segment("forward"), segment("backward")], {GELU: 0, ADD: 1, REDUCE: 2})
    assert graph.bounds.tolist() == [0, 4, 8]
    assert graph.work.tolist() == [1, 2, 2, 0] * 2
    assert graph.pointer.tolist() == [0, 0, 1, 2, 4, 4, 5, 6, 8]
    assert graph.before.tolist() == [0, 0, 2, 1, 4, 4, 6, 5]
    assert np.isfinite(graph.ready[1]).nonzero()[0].tolist() == [1, 5]
