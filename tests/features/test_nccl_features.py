"""Closed forms of what NCCL's collectives put on the links."""

from __future__ import annotations

import pytest

from stepsight.dataset.hardware.hardware import find_fabric
from stepsight.dataset.kinds.op import Collective
from stepsight.features.nccl_features import NCCL_TERMS, nccl_terms, tree_terms

FABRIC = find_fabric("dgx-h100")  # 450 and 50 GB/s
BETWEEN, WITHIN, STEPS = (NCCL_TERMS.index(t) for t in ("seconds_between_nodes", "seconds_within_node", "steps"))


def test_nothing_leaves_a_node_in_a_group_within_it() -> None:
    terms = nccl_terms(Collective("all_gather", 9_000_000_000, 8, 8), FABRIC)
    assert terms[BETWEEN] == 0
    assert terms[WITHIN] == pytest.approx(9 * 7 / 8 / 450)


def test_all_adapters_of_a_node_work_for_a_ring() -> None:
    terms = nccl_terms(Collective("all_reduce", 10**9, 80, 8), FABRIC)
    assert terms[BETWEEN] == pytest.approx(2 * 79 / 80 / 400)
    assert terms[WITHIN] == pytest.approx(2 * 79 / 80 / 450)


def test_of_an_all_to_all_only_what_is_for_others_leaves_the_node() -> None:
    terms = nccl_terms(Collective("all_to_all", 10**9, 16, 8), FABRIC)
    assert terms[BETWEEN] == pytest.approx(0.5 / 50)
    assert terms[WITHIN] == pytest.approx(7 / 16 / 450)


def test_a_message_takes_its_own_link() -> None:
    terms = nccl_terms(Collective("send_recv", 10**9, 2, 1), FABRIC)
    assert (terms[BETWEEN], terms[WITHIN]) == (pytest.approx(1 / 50), 0.0)


def test_trees_are_as_deep_as_the_logarithm_of_the_nodes() -> None:
    many = Collective("all_reduce", 1 << 20, 2048, 8)
    assert nccl_terms(many, FABRIC)[STEPS] == 2 * 2047
    assert tree_terms(many, FABRIC)[STEPS] == 2 * (7 + 8)
