"""Duration and cost of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepsight.experiments.goodput import Reliability
from stepsight.experiments.search.objectives import Goal
from stepsight.training.predictor.prediction import Prediction

DAY_S = 86400.0


def training_plan(prediction: Prediction, goal: Goal, reliability: Reliability | None = None) -> dict[str, Any]:
    """Compute duration, device-hours, cost and energy of training on ``goal.tokens``.

    Args:
        prediction: Of the job that trains.
        goal: Tokens, critical batch, prices and power.
        reliability: Failures and checkpoints; None: they cost nothing.

    Returns:
        Plain values; ``cost`` and ``energy_kwh`` are None where no price or power is known.  ``low_days`` and
        ``high_days`` follow from the prediction interval.  Energy is an estimate: devices at their rated power.
    """
    job, seconds = prediction.job, (prediction.iteration_time_s, prediction.low_s, prediction.high_s)
    told = goal.objectives(job, seconds)
    losses = {} if reliability is None else reliability.goodput(job.cluster.nodes)
    goodput = losses.get("goodput", 1.0)
    days = told["training_time_s"] / goodput / DAY_S
    cost, energy = told["cost"], told["energy_kwh"]
    return {
        "tokens": goal.tokens,
        "iterations": goal.iterations(job),
        "tokens_per_s": prediction.tokens_per_s * goodput,
        "tokens_per_day": prediction.tokens_per_s * goodput * DAY_S,
        "days": days,
        "low_days": days * prediction.low_s / prediction.iteration_time_s,
        "high_days": days * prediction.high_s / prediction.iteration_time_s,
        "device_hours": days * 24.0 * job.cluster.num_devices,
        "cost": None if cost is None else cost / goodput,
        "energy_kwh": None if energy is None else energy / goodput,
        "goodput": goodput,
        **{key: value for key, value in losses.items() if key != "goodput"},
    }


def plan_text(hardware: str, plan: Mapping[str, Any]) -> str:
    """Write a plan as one line: duration with its range, device-hours, and the cost or why none is known."""
    cost = f"no price of {hardware} is known (--prices)" if plan["cost"] is None else f"cost {plan['cost']:,.0f}"
    days = f"{plan['days']:.1f} days ({plan['low_days']:.1f} to {plan['high_days']:.1f})"
    lost = f", goodput {100 * plan['goodput']:.1f} %" if "mtbf_hours" in plan else ""
    return f"{plan['tokens']:.4g} tokens in {days}, {plan['device_hours']:,.0f} device-hours, {cost}{lost}"
