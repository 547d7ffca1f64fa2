"""Networks that are not as stated."""

from __future__ import annotations

from dataclasses import replace

from stepsight.dataset.hardware.hardware import Fabric, Link, find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.training.collectives.between_nodes import UNFITTED
from stepsight.training.collectives.link_doubts import link_doubts

STATED = find_fabric("dgx-h100")
WORKS = [Collective("all_reduce", 1 << power, 16, 8) for power in (3, 6, 9, 26, 28, 30, 32)]


def _doubts(bandwidth: float = 50e9, latency: float = 10e-6) -> tuple[str, ...]:
    real: Fabric = replace(STATED, inter_node=Link(bandwidth, latency))
    return link_doubts(WORKS, STATED, UNFITTED.seconds(WORKS, real))


def test_links_as_stated_are_not_doubted() -> None:
    assert _doubts() == () == _doubts(35e9, 20e-6)
    assert link_doubts([Collective("all_reduce", 1, 8, 8)], STATED, [1.0]) == ()  # type: ignore[arg-type]


def test_sockets_are_named() -> None:
    (doubt,) = _doubts(2.5e9)
    assert "behave 20 times slower than stated (about 2.5 of 50 GB/s per device)" in doubt
    assert "sockets transport" in doubt


def test_latencies_and_bits_are_named() -> None:
    assert "short messages between nodes take" in _doubts(latency=1e-3)[0]
    slow = replace(STATED, inter_node=Link(6.25e9, 10e-6))
    assert "faster than stated (6.25 GB/s per device)" in link_doubts(WORKS, slow, UNFITTED.seconds(WORKS, STATED))[0]
