"""Formulas of what a kernel loses beside collectives: a constant share, processors held, waves of blocks, a delay.

A collective's blocks keep their processors until it ends, so a kernel beside it runs on what they leave; and every
kernel starts and ends later, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch_geometric.data import HeteroData

from stepsight.experiments.studies.context.edgeless_models import Answers, Fit, Fitted

if TYPE_CHECKING:
    from stepsight.experiments.studies.context.context_task import ContextTask

Array = NDArray[np.float64]
DELAY_S = 1e-5  # unit of delays, so that all constants are of one order
Terms = Callable[[Array, Array], Array]  # seconds alone and ``held`` to what each constant is multiplied by, (n, k)


def _scalar(alone: Array, held: Array) -> Array:
    return (alone * held[:, 0])[:, None]


def _processors(alone: Array, held: Array) -> Array:
    return (alone * held[:, 0] * held[:, 1])[:, None]


def _processors_and_delay(alone: Array, held: Array) -> Array:
    return np.stack([alone * held[:, 0] * held[:, 1], DELAY_S * held[:, 0] * held[:, 1]], axis=1)


def _waves_and_delay(alone: Array, held: Array) -> Array:
    return np.stack([alone * held[:, 0] * held[:, 2], DELAY_S * held[:, 0] * held[:, 1]], axis=1)


def preset(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
    """The share that the hardware's preset says is lost, with nothing fitted."""

    def answer(asked: Sequence[HeteroData]) -> Answers:
        found = []
        for graph in asked:
            alone, held = _of(graph)
            found.append(alone * (1.0 + held[:, 0] * held[:, 3]))
        return found, np.array([each.sum() for each in found])

    return answer


def formula(terms: Terms) -> Fit:
    """Seconds alone plus terms with constants of at least 0, fitted to the weighted mean |log| error."""

    def fit(task: ContextTask, graphs: Sequence[HeteroData], seed: int) -> Fitted:
        alone, rows, seconds, weight = [], [], [], []
        for graph in graphs:
            known = np.isfinite(graph["op"].seconds.numpy())
            own, held = _of(graph)
            alone.append(own[known])
            rows.append(terms(own, held)[known])
            seconds.append(graph["op"].seconds.double().numpy()[known])
            weight.append(graph["op"].weight.double().numpy()[known])
        constants = fit_constants(*(np.concatenate(each) for each in (alone, rows, seconds, weight)))

        def answer(asked: Sequence[HeteroData]) -> Answers:
            found = [own + terms(own, held) @ constants for own, held in map(_of, asked)]
            return found, np.array([each.sum() for each in found])

        return answer

    return fit


def fit_constants(alone: Array, rows: Array, seconds: Array, weight: Array) -> Array:
    """Constants of at least 0, ``(k,)``, with the least weighted mean |log| error of ``alone + rows @ constants``."""

    def loss(constants: Array) -> float:
        off = np.log((alone + rows @ np.maximum(constants, 0.0)) / seconds)
        return float(np.average(np.abs(off), weights=weight + 1e-15))

    starts = (np.full(rows.shape[1], start) for start in (0.1, 1.0))
    found = [minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6}) for start in starts]
    best = min(found, key=lambda each: float(each.fun))
    return np.maximum(np.asarray(best.x, dtype=np.float64), 0.0)


def _of(graph: HeteroData) -> tuple[Array, Array]:
    return graph["op"].baseline.double().numpy(), graph["op"].held.double().numpy()


def _factor(alone: Array, held: Array) -> Array:
    return alone[:, None]


def _ops_and_collectives(alone: Array, held: Array) -> Array:
    return alone[:, None] * held[:, 1:3]


def _bandwidth(alone: Array, held: Array) -> Array:
    return alone[:, None] * held[:, 2:4]


PAIR_FORMULAS: dict[str, Fit] = {  # of two ranks of a host
    "one factor": formula(_factor),
    "one share": formula(_scalar),
    "a share beside ops, another beside collectives": formula(_ops_and_collectives),
    "bandwidth of both ops, and a share beside collectives": formula(_bandwidth),
}
FORMULAS: dict[str, Fit] = {
    "share of the preset": preset,
    "one share": formula(_scalar),
    "processors held": formula(_processors),
    "processors held and a delay": formula(_processors_and_delay),
    "waves of blocks and a delay": formula(_waves_and_delay),
}
