"""Programs are in issue order; stream order is implied."""

import pytest

from stepsight.dataset.graph.program import Dependency, Program, ProgramBuilder
from stepsight.dataset.kinds.op import Op

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
