"""Rooflines of kinds of work, and ring costs of collectives."""

from dataclasses import replace

import pytest

from stepsight.dataset.hardware.hardware import (
    Hardware,
    alpha_beta_seconds,
    exponential_seconds,
    find_fabric,
    roofline_seconds,
)
from stepsight.dataset.kinds.op import OP_KINDS, Collective, Op

DEVICE = Hardware(
    name="toy",
    kind="gpu",
    peak_flops={"fp32": 1e13, "bf16": 1e14, "fp8": 2e14},
    memory_bandwidth_bytes_per_s=1e12,
    memory_bytes=80e9,
    host_link_bytes_per_s=2e10,
    host_op_s=8e-6,
)


@pytest.mark.parametrize("kind", OP_KINDS)
def test_more_of_everything_is_never_slower(kind: str) -> None:
    """Twice the peak, the bandwidth and the host's link: no op takes longer, and none takes no time."""
    record = OP_KINDS[kind]
    op = Op(kind, tuple(1 if name in record.flags else 64 for name in record.dim_names), "bf16")
    better = replace(
        DEVICE,
        peak_flops={"bf16": 2e14},
        memory_bandwidth_bytes_per_s=2e12,
        host_link_bytes_per_s=4e10,
    )
    assert 0 < roofline_seconds(op, better) <= roofline_seconds(op, DEVICE)


def test_transfers_take_the_hosts_link() -> None:
    assert roofline_seconds(Op("to_host", (10**9,), "bf16"), DEVICE) == 2e9 / 2e10
    assert roofline_seconds(Op("from_host", (10**9,), "fp32"), DEVICE) == 4e9 / 2e10


def test_an_optimizer_on_the_host_takes_its_memorys_time() -> None:
    """Gradient, parameter and both moments read, the last three written: seven fp32 numbers for each element."""
    assert roofline_seconds(Op("adamw_host", (10**9, 12), "fp32"), DEVICE) == 7 * 4e9 / 25e9


def test_fp8_products_run_at_their_own_peak() -> None:
    sizes = (8192, 8192, 8192)
    wide, narrow = (roofline_seconds(Op("linear", sizes, dtype), DEVICE) for dtype in ("bf16", "fp8"))
    assert wide == 2 * narrow


def test_many_small_experts_are_bound_by_their_weights() -> None:
    """A product of few rows reads every expert's matrix: memory, not arithmetic, sets its time."""
    few = Op("grouped_linear", (64, 128, 2048, 2048), "bf16")
    assert roofline_seconds(few, DEVICE) == few.num_bytes / 1e12 > few.flops / 1e14


def test_an_all_reduce_takes_what_its_two_halves_take() -> None:
    fabric = find_fabric("dgx-a100")
    whole, *halves = (
        alpha_beta_seconds(Collective(kind, 2**30, 16, 8), fabric)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole == pytest.approx(sum(halves))


def test_batched_rows_that_are_not_aligned_miss_the_tensor_cores() -> None:
    """Heads of 108 in 16 bits run at fp32's rate; those of 112, and fp32 itself, as before."""
    odd, even, wide = (
        roofline_seconds(Op("batched_matmul", (64, 2048, 2048, head), dtype), DEVICE)
        for head, dtype in ((108, "bf16"), (112, "bf16"), (108, "fp32"))
    )
    assert odd > 5 * even and odd == pytest.approx(wide, rel=0.01)


def test_exponentials_of_attention() -> None:
    """One for each pair of a query and a key, of which a causal mask leaves half; nothing else has them."""
    fast = replace(DEVICE, exponentials_per_s=1e12)
    whole, causal = (
        exponential_seconds(Op("attention", (1, 8, 8, 1024, 1024, 64, flag), "bf16"), fast) for flag in (0, 1)
    )
    assert whole == 2 * causal == 8 * 1024**2 / 1e12
    assert exponential_seconds(Op("linear", (64, 64, 64), "bf16"), fast) == 0.0
