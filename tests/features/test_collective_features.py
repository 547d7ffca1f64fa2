from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric, Link, find_fabric
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective
from stepsight.dataset.runs.run_manifest import read_box
from stepsight.features.collective_features import (
    CHOICE_TERMS,
    COLLECTIVE_FEATURES,
    COLLECTIVE_TERMS,
    NCCL,
    NCCL_TERMS,
    OVERLAPPING,
    choice_terms,
    collective_features,
    collective_position,
    collective_terms,
    link_facts,
    nccl_terms,
    tree_terms,
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


FABRIC = find_fabric("dgx-h100")  # 450 and 50 GB/s, 5 and 10 us
BETWEEN, WITHIN, STEPS = (NCCL_TERMS.index(t) for t in ("seconds_between_nodes", "seconds_within_node", "steps"))


def test_nothing_leaves_a_node_in_a_group_within_it() -> None:
    terms = nccl_terms(Collective("all_gather", 9_000_000_000, 8, 8), FABRIC)
    assert terms[BETWEEN] == 0
    assert terms[WITHIN] == pytest.approx(9 * 7 / 8 / 450)


def test_a_message_takes_its_own_link() -> None:
    terms = nccl_terms(Collective("send_recv", 10**9, 2, 1), FABRIC)
    assert (terms[BETWEEN], terms[WITHIN]) == (pytest.approx(1 / 50), 0.0)


CALL, QUICK, BULK, ADAPTERS, LINKS = range(len(CHOICE_TERMS))
RING_LL, RING_LL128, RING, TREE_LL, TREE_LL128, TREE, NVLS = range(7)


def _terms(work: Collective, fabric: Fabric = FABRIC) -> NDArray[np.float64]:
    return choice_terms([work], link_facts(fabric))[0]


def test_a_ring_passes_every_rank_and_leaves_each_node_once() -> None:
    """LL: 15 steps for 16 ranks, one of them between the two nodes."""
    terms = _terms(Collective("all_gather", 1 << 20, 16, 8))
    assert terms[RING_LL, CALL] == pytest.approx(6.6e-6)
    assert terms[RING_LL, QUICK] == pytest.approx((14 * 1.0 + 2.7) * 1e-6)
    assert terms[RING, BULK] == pytest.approx((14 * 3.4 + 14.0 * (1 + NCCL.step_growth)) * 1e-6)


def test_all_adapters_of_a_node_work_for_a_ring() -> None:
    terms = nccl_terms(Collective("all_reduce", 10**9, 80, 8), FABRIC)
    assert terms[BETWEEN] == pytest.approx(2 * 79 / 80 / 400)
    assert terms[WITHIN] == pytest.approx(2 * 79 / 80 / 450)
    terms = _terms(Collective("all_reduce", 10**9, 80, 8))
    assert terms[RING, ADAPTERS] == pytest.approx(2 * 79 / 80 / 400)
    assert terms[RING, LINKS] == pytest.approx(2 * 79 / 80 / 450)
    assert terms[RING_LL128, ADAPTERS] == pytest.approx(2 * 79 / 80 / 400 / 0.92)


@pytest.mark.parametrize(("nodes", "factor"), [(2, 1.0), (4, 1.0), (16, 2.0)])
def test_a_network_that_loses_bandwidth_with_nodes(nodes: int, factor: float) -> None:
    work = Collective("all_gather", 10**9, 8 * nodes, 8)
    lossy = replace(FABRIC, inter_node=replace(FABRIC.inter_node, scaling_loss=0.5))
    assert _terms(work, lossy)[RING, ADAPTERS] == pytest.approx(factor * _terms(work)[RING, ADAPTERS])


def test_trees_are_as_deep_as_the_logarithm_of_the_nodes() -> None:
    many = Collective("all_reduce", 1 << 20, 2048, 8)
    assert nccl_terms(many, FABRIC)[STEPS] == 2 * 2047
    assert tree_terms(many, FABRIC)[STEPS] == 2 * (7 + 8)
    terms = _terms(Collective("all_reduce", 8, 2048, 8))
    assert terms[TREE_LL, QUICK] == pytest.approx(2 * (7 * 0.6 + 8 * 5.0) * 1e-6, rel=1e-3)
    assert terms[RING_LL, QUICK] > 10 * terms[TREE_LL, QUICK]


def test_latency_beyond_infiniband_is_added_to_each_step_and_twice_in_simple() -> None:
    """A tree over 32 nodes of one device: 2 * 5 steps."""
    work = Collective("all_reduce", 8, 32, 1)
    later = replace(FABRIC, inter_node=replace(FABRIC.inter_node, latency_s=40e-6))
    before, after = _terms(work), _terms(work, later)
    assert after[TREE_LL, QUICK] - before[TREE_LL, QUICK] == pytest.approx(2 * 5 * 30e-6)
    assert after[TREE, BULK] - before[TREE, BULK] == pytest.approx(2 * 5 * 60e-6)


def test_a_link_without_ll128_has_no_such_choice() -> None:
    work = Collective("all_reduce", 1 << 20, 64, 8)
    without = _terms(work, replace(FABRIC, inter_node=replace(FABRIC.inter_node, ll128=False)))
    assert not np.isfinite(without[[RING_LL128, TREE_LL128]].sum(axis=1)).any()
    assert (np.isfinite(without) == np.isfinite(_terms(work)))[[RING_LL, RING, TREE_LL, TREE]].all()


def test_a_small_sum_waits_for_its_last_byte_at_each_step_between_nodes() -> None:
    """LL doubles the bytes: 64 KiB through one adapter of 50 GB/s, up and down 3 levels; larger sums use more."""
    small, large = (_terms(Collective("all_reduce", size, 64, 8))[TREE_LL, QUICK] for size in (1 << 16, 1 << 20))
    empty = 2 * (7 * 0.6 + 3 * 5.0) * 1e-6
    assert small == pytest.approx(empty + 2 * 3 * 2 * (1 << 16) / 50e9)
    assert large == small


def test_messages_that_the_host_posts_slowly_follow_each_other_in_rings_and_exchanges() -> None:
    slow = replace(FABRIC, inter_node=replace(FABRIC.inter_node, message_s=8e-6))
    ring = _terms(Collective("all_gather", 1 << 10, 64, 8), slow)
    assert ring[RING_LL, QUICK] == pytest.approx(63 * 8e-6)
    assert ring[RING, BULK] == pytest.approx(63 * 24e-6)
    exchange = Collective("all_to_all", 1 << 10, 64, 8)
    assert _terms(exchange, slow)[0, BULK] - _terms(exchange)[0, BULK] > 56 * 3e-6


def test_facts_of_slingshot_count_for_what_they_name() -> None:
    """A rendezvous for steps in Simple, the rate of LL for rings in LL, a share of the links for exchanges."""
    work, exchange = Collective("all_gather", 1 << 30, 64, 8), Collective("all_to_all", 1 << 30, 64, 8)

    def slower(work: Collective, choice: int, term: int, **facts: float) -> float:
        fabric = replace(FABRIC, inter_node=replace(FABRIC.inter_node, **facts))
        return float(_terms(work, fabric)[choice, term] - _terms(work)[choice, term])

    assert slower(work, RING, BULK, rendezvous_s=40e-6) > 50 * 30e-6
    assert slower(work, RING_LL, QUICK, rendezvous_s=40e-6) == 0
    assert slower(work, RING_LL, ADAPTERS, ll_bytes_per_s=5e9) > 0.1
    assert slower(work, RING, ADAPTERS, ll_bytes_per_s=5e9) == 0 == slower(work, RING, ADAPTERS, direct_share=0.5)
    assert slower(exchange, 0, ADAPTERS, direct_share=0.5) == pytest.approx(_terms(exchange)[0, ADAPTERS])
    injected = [slower(Collective("all_to_all", size * 64, 64, 8), 0, BULK, inject_s=8e-6) for size in (192, 193)]
    assert injected == pytest.approx([56 * 8e-6, 0])


@pytest.mark.parametrize(("adapter", "leaving"), [(25e9, 2 * 25 / 41.4), (100e9, 2.0)])
def test_each_byte_leaves_a_node_once_in_a_tree_of_two_nodes(adapter: float, leaving: float) -> None:
    """As far as its channels carry it: 41.4 GB/s by adapter on H100."""
    link = Link(25e9, 10e-6, adapter_bytes_per_s=adapter)
    terms = _terms(Collective("all_reduce", 1 << 30, 8, 4), replace(FABRIC, inter_node=link))
    assert terms[TREE, ADAPTERS] == pytest.approx(leaving * (1 << 30) / (0.9 * 0.92 * 100e9))


def test_of_an_all_to_all_only_what_is_for_others_leaves_the_node() -> None:
    terms = nccl_terms(Collective("all_to_all", 10**9, 16, 8), FABRIC)
    assert terms[BETWEEN] == pytest.approx(0.5 / 50)
    assert terms[WITHIN] == pytest.approx(7 / 16 / 450)
    terms = _terms(Collective("all_to_all", 10**9, 16, 8))
    assert terms[0, ADAPTERS] == pytest.approx(0.5 / 50)
    assert terms[0, LINKS] == pytest.approx(7 / 16 / 450)


def test_a_message_takes_its_own_link_and_its_latency() -> None:
    terms = _terms(Collective("send_recv", 10**9, 2, 1))
    assert (terms[0, QUICK], terms[0, ADAPTERS], terms[0, LINKS]) == (pytest.approx(1e-5), pytest.approx(1 / 50), 0)


def test_switches_that_sum_are_those_of_hopper_and_later() -> None:
    work = Collective("all_reduce", 1 << 24, 16, 8)
    assert np.isfinite(_terms(work)[NVLS]).all()
    assert not np.isfinite(_terms(work, find_fabric("dgx-a100"))[NVLS]).all()
    assert not np.isfinite(_terms(replace(work, group_size=4, ranks_per_node=2))[NVLS]).all()


def test_a_partly_filled_node_counts_as_a_full_one() -> None:
    assert (_terms(Collective("all_gather", 1 << 20, 57, 8)) == _terms(Collective("all_gather", 1 << 20, 64, 8))).all()


@pytest.mark.parametrize("kind", sorted(COLLECTIVE_KINDS))
def test_stated_latencies_and_bandwidths_count(kind: str) -> None:
    """The slower network is slower in every choice that there is."""
    work = Collective(kind, 1 << 22, 2 if kind == "send_recv" else 64, 1 if kind == "send_recv" else 8)
    far = FABRIC.inter_node
    late = replace(FABRIC, inter_node=Link(far.bandwidth_bytes_per_s, 100 * far.latency_s))
    slow = replace(FABRIC, inter_node=Link(far.bandwidth_bytes_per_s / 10, far.latency_s))
    here = _terms(work)
    there = np.isfinite(here).all(axis=1)
    for other in (late, slow):
        assert (_terms(work, other)[there].sum(axis=1) > here[there].sum(axis=1)).all()
