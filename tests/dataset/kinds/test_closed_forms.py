"""Costs of ops and collectives as closed forms, with numbers worked out by hand."""

import json

import pytest

from stepsight.dataset.hardware.hardware import Fabric, Link, alpha_beta_seconds
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, OP_KINDS, Collective, Op
from tests.dataset.kinds.recorded_costs import RECORD, costs

KNOWN = json.loads(RECORD.read_text("utf-8"))


@pytest.mark.parametrize("kind", KNOWN)
def test_costs_are_as_on_record(kind: str) -> None:
    assert costs(kind) == KNOWN[kind]


@pytest.mark.parametrize(
    ("kind", "dims", "flops", "elements"),
    [
        ("linear", (3, 5, 7), 2 * 3 * 5 * 7, 3 * 5 + 3 * 7 + 5 * 7),
        ("attention", (2, 4, 4, 8, 8, 16, 0), 4 * 2 * 4 * 8 * 8 * 16, 4 * 2 * 4 * 8 * 16),
        ("attention", (2, 4, 4, 8, 8, 16, 1), 2 * 2 * 4 * 8 * 8 * 16, 4 * 2 * 4 * 8 * 16),
        ("swiglu", (100,), 600, 300),
        ("swiglu_backward", (100,), 1200, 500),
        ("gelu", (100,), 1000, 200),
        ("add", (100,), 100, 300),
        ("copy", (100,), 0, 200),
        ("softmax", (3, 5), 75, 30),
        ("softmax_backward", (3, 5), 60, 45),
        ("cross_entropy", (3, 5), 75, 30),
        ("embedding", (3, 5, 7), 0, 30),
        ("embedding_backward", (3, 5, 7), 15, 3 * 15 + 35),
    ],
)
def test_flop_and_elements_of_an_op(kind: str, dims: tuple[int, ...], flops: float, elements: float) -> None:
    op = Op(kind, dims, "bf16")
    assert op.flops == flops
    assert op.num_bytes == 2 * elements


FABRIC = Fabric(
    name="toy", intra_node=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11),
    inter_node=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "group_size", "per_node", "seconds"),
    [
        ("all_reduce", 4, 4, 2 * (3e-6 + 3 / 4 * 1e9 / 1e11)),  # twice around a ring of four
        ("all_gather", 4, 4, 3e-6 + 3 / 4 * 1e9 / 1e11),
        ("reduce_scatter", 2, 2, 1e-6 + 1 / 2 * 1e9 / 1e11),
        ("all_gather", 8, 4, 3e-6 + 1e-5 + 7 / 8 * 1e9 / 4e10),  # four ranks of a node share four links
        ("all_gather", 32, 16, 15e-6 + 1e-5 + 31 / 32 * 1e9 / 1e11),  # more links than the node's own can feed
        ("all_to_all", 8, 4, 3e-6 + 1e-5 + 4 / 8 * 1e9 / 1e10),
        ("all_to_all", 4, 4, 3e-6 + 3 / 4 * 1e9 / 1e11),
        ("send_recv", 2, 2, 1e-6 + 1e9 / 1e11),
        ("send_recv", 2, 1, 1e-5 + 1e9 / 1e10),
    ],
)
def test_the_ring_moves_each_byte_n_minus_1_of_n_times(
    kind: str, group_size: int, per_node: int, seconds: float
) -> None:
    assert alpha_beta_seconds(Collective(kind, 10**9, group_size, per_node), FABRIC) == pytest.approx(
        seconds, rel=1e-12
    )


def test_every_kind_is_on_record() -> None:
    assert set(KNOWN) <= {*OP_KINDS, *COLLECTIVE_KINDS}
