"""Settings of measurements, as Python callers and the command line state them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stepsight.dataset.base.errors import StepsightError


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often a run is repeated.

    Attributes:
        rounds: Rounds: each runs every job once, so that drift of the machine becomes visible.
        steps: Timed steps per round, without a profiler.

    Raises:
        StepsightError: If a number is not allowed.
    """

    rounds: int = 3
    steps: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name in ("rounds", "steps", "warmup"))
            if isinstance(value, int | float) and not least <= value < math.inf:
                raise StepsightError(f"{field.name} must be a number >= {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class CollectSettings(Rounds):
    """What is measured of each run, and how often.

    Attributes:
        role: Purpose of the runs. Only runs with the role `train` can train a predictor.
        warmup: Warm-up steps of each round. Default: 2; in a box 1.
        profile_steps: Profiled steps in the last round. Default: 2; in a box 0.
        event_seconds: Seconds for measuring all distinct ops and collectives. 0: skip this.
        extra_seconds: Seconds for more rounds of the jobs whose times vary most; for busy machines.
    """

    role: str = "train"
    warmup: int | None = None
    profile_steps: int | None = None
    event_seconds: float = 30.0
    extra_seconds: float = 0.0

    def counts(self, in_box: bool = False) -> dict[str, int]:
        """The numbers of steps and rounds for a plan."""
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "warmup": (1 if in_box else 2) if self.warmup is None else self.warmup,
            "profile_steps": (0 if in_box else 2) if self.profile_steps is None else self.profile_steps,
        }
