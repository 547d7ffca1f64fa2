import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.box_spec import read_box
from stepsight.features.collective_features import (
    COLLECTIVE_FEATURES,
    COLLECTIVE_TERMS,
    OVERLAPPING,
    collective_features,
    collective_position,
    collective_terms,
    wire_bytes,
    wire_seconds,
)

LOOPBACK = find_fabric("loopback")
WIRE = COLLECTIVE_TERMS.index("wire_seconds")


def test_no_collectives_give_no_rows() -> None:
    assert collective_features([], []).shape == (0, len(COLLECTIVE_FEATURES))


def test_an_all_reduce_sends_twice_what_an_all_gather_does() -> None:
    reduce, gather = (Collective(kind, 1 << 20, 4, 4) for kind in ("all_reduce", "all_gather"))
    assert wire_bytes(reduce) == 2 * wire_bytes(gather) == 1.5 * (1 << 20)
    assert collective_terms(reduce, LOOPBACK)[1] == 2 * collective_terms(gather, LOOPBACK)[1] == 6


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "send_recv"])
def test_on_a_link_twice_as_fast_the_wire_takes_half_and_nothing_else_changes(kind: str) -> None:
    message = Collective(kind, 1 << 20, 2 if kind == "send_recv" else 4, 1)
    slow, fast = (collective_terms(message, read_box(text).links) for text in ("4x1@200mbit", "4x1@400mbit"))
    assert slow[WIRE] == pytest.approx(2 * fast[WIRE])
    assert np.delete(slow, WIRE) == pytest.approx(np.delete(fast, WIRE))


def test_within_a_node_only_the_link_of_the_node_counts() -> None:
    within, across = Collective("all_reduce", 1 << 20, 2, 2), Collective("all_reduce", 1 << 20, 2, 1)
    slow, fast = read_box("2x2@200mbit").links, read_box("2x2@400mbit").links
    assert wire_seconds(within, slow) == wire_seconds(within, fast)
    assert wire_seconds(across, slow) == pytest.approx(2 * wire_seconds(across, fast))


def test_a_ring_leaves_a_node_through_the_links_of_all_its_ranks() -> None:
    """A link's bandwidth is that of one device: two ranks of a node have twice that between them."""
    fabric = find_fabric("dgx-a100")
    assert fabric is not None
    alone, together = Collective("all_gather", 1 << 20, 4, 1), Collective("all_gather", 1 << 20, 4, 2)
    assert wire_seconds(alone, fabric) == pytest.approx(2 * wire_seconds(together, fabric))


def test_the_terms_that_overlap_are_the_wire_and_the_messages_of_the_host() -> None:
    assert [COLLECTIVE_TERMS[index] for index in OVERLAPPING] == ["wire_seconds", "messages"]


def test_a_position_tells_links_apart_and_stays_finite() -> None:
    message = Collective("all_reduce", 1 << 20, 4, 1)
    slow, fast = (collective_position(message, read_box(text).links) for text in ("4x1@200mbit", "4x1@800mbit"))
    assert (slow - fast)[:3].tolist() == [0.0, 0.0, 0.0]
    assert (slow - fast)[3] == pytest.approx(np.log(4))
    assert np.isfinite(collective_position(Collective("all_reduce", 0, 2, 2), LOOPBACK)).all()
