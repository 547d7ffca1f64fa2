"""Duration and cost of a training, with its losses to failures and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.dataset.job.job import Job
    from stepsight.experiments.search.settings import Goal
    from stepsight.training.prediction.prediction import Prediction

HOUR_S, DAY_S = 3600.0, 86400.0
TOKENS, SAMPLES = 1e12, 1e9  # of a training, until the user states them


def usual_amount(job: Job) -> float:
    """The tokens of a training that is not stated, or the samples of a recommendation model."""
    return SAMPLES if job.model.tables else TOKENS


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The failure rate of nodes, and the costs of a checkpoint and a restart.

    Checkpoints are written every ``sqrt(2 * C * M)`` seconds, which is optimal for the checkpoint cost ``C`` and the
    mean time between failures ``M`` of the whole job (Young 1974); a failure loses half an interval and the restart.

    Attributes:
        node_mtbf_hours: Mean time between failures of one node, in hours. Duration and cost then include failures and
            checkpoints. 0: they include none.
        checkpoint_s: Seconds for which a checkpoint stops training.
        restart_s: Seconds from a failure until training continues, without the work that is repeated.

    Raises:
        StepsightError: If a value is not allowed.
    """

    node_mtbf_hours: float = 0.0
    checkpoint_s: float = 30.0
    restart_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("node_mtbf_hours", "checkpoint_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StepsightError(f"{name} must be a number >= 0, got {getattr(self, name)!r:.80}")
        if self.node_mtbf_hours and not self.checkpoint_s:
            raise StepsightError("checkpoint_s must be > 0: checkpoints without cost have no best interval")

    def goodput(self, nodes: int) -> dict[str, Any]:
        """Compute the share of time that is spent on training, and the shares lost to checkpoints, repeated work and
        restarts; empty if failures are not counted.
        """
        if not self.node_mtbf_hours:
            return {}
        mtbf_s = self.node_mtbf_hours * HOUR_S / nodes
        interval = math.sqrt(2.0 * self.checkpoint_s * mtbf_s)
        writing = self.checkpoint_s / (interval + self.checkpoint_s)
        repeated = min(1.0, 0.5 * (interval + self.checkpoint_s) / mtbf_s)
        restarting = min(1.0, self.restart_s / mtbf_s)
        training = (1.0 - writing) * (1.0 - repeated - restarting)
        if training <= 0:
            rule = f"failures must be rarer than restarts: {nodes} nodes fail every {mtbf_s / 60:.1f} minutes"
            raise StepsightError(f"{rule}, a failure loses {(interval / 2 + self.restart_s) / 60:.1f} minutes")
        return {
            "goodput": training,
            "mtbf_hours": mtbf_s / HOUR_S,
            "checkpoint_interval_s": interval,
            "lost_to_checkpoints": writing,
            "lost_to_repeated_work": repeated * (1.0 - writing),
            "lost_to_restarts": restarting * (1.0 - writing),
        }


def training_plan(prediction: Prediction, goal: Goal, reliability: Reliability | None = None) -> dict[str, Any]:
    """Compute duration, device-hours, cost and energy of training on ``goal.tokens``.

    ``cost`` and ``energy_kwh`` (an estimate: devices at their rated power) are None where no price or power is known.
    """
    job, seconds = prediction.job, (prediction.iteration_time_s, prediction.low_s, prediction.high_s)
    told, losses = goal.objectives(job, seconds), (reliability or Reliability()).goodput(job.cluster.nodes)
    goodput = losses.get("goodput", 1.0)
    days = told["training_time_s"] / goodput / DAY_S
    return {
        "tokens": goal.tokens,
        "unit": job.unit,
        "iterations": goal.iterations(job),
        "tokens_per_s": prediction.tokens_per_s * goodput,
        "tokens_per_day": prediction.tokens_per_s * goodput * DAY_S,
        "days": days,
        "low_days": days * prediction.low_s / prediction.iteration_time_s,
        "high_days": days * prediction.high_s / prediction.iteration_time_s,
        "device_hours": days * 24.0 * job.cluster.num_devices,
        **{key: told[key] and told[key] / goodput for key in ("cost", "energy_kwh")},
        **{"goodput": goodput, **losses},
    }


def plan_text(hardware: str, plan: Mapping[str, Any]) -> str:
    """Write a plan as one line: duration with its range, device-hours, and the cost or why none is known."""
    cost = f"no price of {hardware} is known (--prices)" if plan["cost"] is None else f"cost {plan['cost']:,.0f}"
    days = f"{plan['days']:.1f} days ({plan['low_days']:.1f} to {plan['high_days']:.1f})"
    lost = f", goodput {100 * plan['goodput']:.1f} %" if "mtbf_hours" in plan else ""
    return f"{plan['tokens']:.4g} {plan['unit']} in {days}, {plan['device_hours']:,.0f} device-hours, {cost}{lost}"
