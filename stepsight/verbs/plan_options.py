"""Options about training as a whole: tokens, prices, failures and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.options import path

if TYPE_CHECKING:
    from stepsight.experiments.questions.training_plan import Reliability
    from stepsight.experiments.search.settings import Goal
    from stepsight.training.predictor.prediction import Prediction

Tokens = Annotated[
    float,
    typer.Option(help="Tokens to train on, for duration, device-hours, cost and energy.", show_default="1e12"),
]
Prices = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        help="A .toml file with a table [price_per_device_hour] by hardware, and optionally [power_w], which replaces "
        "the watts of the datasheets.",
    ),
]
NodeMtbf = Annotated[
    float,
    typer.Option(
        "--node-mtbf-hours",
        min=0,
        help="Mean time between failures of one node, in hours. Duration and cost then include failures and "
        "checkpoints. 0: they include none.",
    ),
]
CheckpointSeconds = Annotated[
    float, typer.Option("--checkpoint-s", min=0, help="Seconds for which a checkpoint stops training.")
]
RestartSeconds = Annotated[
    float, typer.Option("--restart-s", min=0, help="Seconds from a failure until training continues.")
]


def goal_of(tokens: float, prices: Path | None) -> Goal:
    """The goal of a training, from the options."""
    from stepsight.experiments.search.settings import Goal, read_prices

    price, power = ({}, {}) if prices is None else read_prices(prices)
    return Goal(tokens=tokens, prices=price, power_w=power)


def add_plan(report: dict[str, Any], prediction: Prediction, tokens: float | None, prices: Path | None) -> None:
    """Add to a job's report what training on ``tokens`` takes; None: add nothing.

    Raises:
        StepsightError: If there are prices without tokens.
    """
    if tokens is None:
        if prices is not None:
            raise StepsightError("--prices needs --tokens: the number of tokens to train on")
        return
    from stepsight.experiments.questions.training_plan import plan_text, training_plan

    plan = training_plan(prediction, goal_of(tokens, prices))
    report["plan"] = plan
    report["text"] += f"\ntraining   {plan_text(prediction.job.hardware_name, plan)}"


def reliability_of(node_mtbf_hours: float, checkpoint_s: float, restart_s: float) -> Reliability | None:
    """Failures and checkpoints, from the options; None: they are not counted."""
    from stepsight.experiments.questions.training_plan import Reliability

    if not node_mtbf_hours:
        return None
    return Reliability(node_mtbf_hours=node_mtbf_hours, checkpoint_s=checkpoint_s, restart_s=restart_s)
