"""Every op kind of the vocabulary can be measured by its signature."""

from __future__ import annotations

import pytest
import torch

from stepsight.dataset.harness.errors import HarnessError
from stepsight.dataset.harness.events import _merge
from stepsight.dataset.harness.ops import Pool, op_call
from stepsight.dataset.op import OP_KINDS

DIMS = {
    "gemm": [8, 6, 4],
    "attention": [2, 4, 2, 8, 8, 4, 1],
    "norm": [8, 16],
    "reduce": [8, 16],
    "embedding": [8, 16, 32],
    "loss": [8, 32],
    "optimizer": [1000, 7],
    "elementwise": [96],
}


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(torch.device("cpu"), torch.float32, numel=64)


@pytest.mark.parametrize("kind", OP_KINDS)
def test_op_runs_twice_on_other_inputs(kind: str, pool: Pool) -> None:
    call = op_call(kind, DIMS[OP_KINDS[kind].family], pool)
    for _ in range(2):
        call.run(*call.inputs())


def test_gemm_is_the_models_product(pool: Pool) -> None:
    """dims are the forward linear's: m rows, n outputs, k inputs; gradients swap them."""
    shapes = {}
    for kind in ("linear", "linear_dgrad", "linear_wgrad"):
        call = op_call(kind, [8, 6, 4], pool)
        shapes[kind] = tuple(call.run(*call.inputs()).shape)
    assert shapes == {"linear": (8, 6), "linear_dgrad": (8, 4), "linear_wgrad": (6, 4)}


def test_pool_grows_and_rotates() -> None:
    pool = Pool(torch.device("cpu"), torch.float32, numel=256)
    first, second = pool.take(8, 8), pool.take(8, 8)
    assert first.data_ptr() != second.data_ptr()
    assert pool.take(1000).numel() == 1000


@pytest.mark.parametrize(
    ("kind", "dims", "text"),
    [
        ("tanh", [1], "op kind must be one of"),
        ("attention", [1, 1, 1, 8, 4, 4, 1], "q_len = kv_len"),
        ("rope", [3], "even"),
    ],
)
def test_unknown_op_is_refused(kind: str, dims: list[int], text: str, pool: Pool) -> None:
    with pytest.raises(HarnessError, match=text):
        op_call(kind, dims, pool)


@pytest.mark.parametrize(("kind", "seconds"), [("all_reduce", 5.0), ("send_recv", 1.0)])
def test_collective_takes_its_last_rank_and_a_message_its_quicker_side(
    kind: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [[{"collective": {"kind": kind}, "samples": samples}] for samples in ([1.0, 5.0, 9.0], [5.0, 1.0, 1.0])]
    monkeypatch.setattr("stepsight.dataset.harness.events.gather", lambda _: ranks)
    (record,) = _merge(ranks[0])
    assert record["seconds"] == seconds
    assert record["repeats"] == 3
