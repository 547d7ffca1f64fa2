"""A made-up device whose ops and collectives take times that are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stepsight.dataset.hardware.hardware import Hardware, find_fabric
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.predictor.predictor import Predictor

SIZES = (64, 96, 128, 192, 256, 384, 512)


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    return Hardware(
        name="toy",
        kind="cpu",
        peak_flops={"fp32": 80e9},
        memory_bandwidth_bytes_per_s=10e9,
        memory_bytes=8e9,
        op_latency_s=5e-6,
    )


@pytest.fixture(scope="session")
def op_truth() -> Callable[[Op, int], float]:
    return lambda op, busy: 8e-6 + op.flops / 50e9 + op.num_bytes / (9e9 / busy**0.5)


@pytest.fixture(scope="session")
def collective_truth() -> Callable[[Collective], float]:
    return lambda c: 1.2e-4 + c.num_bytes / 1.5e9


@pytest.fixture(scope="session")
def ops() -> list[Op]:
    rng = np.random.default_rng(0)
    shapes = rng.choice(SIZES, size=(24, 3))
    found = [Op(kind, tuple(map(int, dims)), "fp32") for kind in ("linear", "linear_wgrad") for dims in shapes]
    found += [Op(kind, (int(m * n),), "fp32") for kind in ("gelu", "add") for m, n, _ in shapes]
    found += [Op("layer_norm", (int(m), int(n)), "fp32") for m, n, _ in shapes]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="session")
def predictor(
    hardware: Hardware,
    ops: list[Op],
    op_truth: Callable[[Op, int], float],
    collective_truth: Callable[[Collective], float],
) -> Predictor:
    rng = np.random.default_rng(1)
    pairs = [(op, busy) for op in ops for busy in (1, 2)]
    seconds = np.array([op_truth(*pair) * np.exp(rng.normal(0, 0.01)) for pair in pairs])
    kernel = fit_kernels([op for op, _ in pairs], [busy for _, busy in pairs], seconds, hardware)
    collectives = [Collective("all_reduce", 2**power, 2, 2) for power in range(8, 24)]
    fabrics = [find_fabric("loopback")] * len(collectives)
    collective = fit_collectives(collectives, fabrics, np.array([collective_truth(c) for c in collectives]))
    return Predictor(hardware, kernel, collective)
