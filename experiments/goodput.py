"""Losses of a long run to failures and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stepsight.dataset.base.errors import StepsightError

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The failure rate of nodes, and the costs of a checkpoint and a restart.

    The optimal checkpoint interval is ``sqrt(2 * C * M)`` with the checkpoint cost ``C`` and the mean time between
    failures ``M`` of the whole job (Young 1974); a failure loses half an interval and the restart.

    Attributes:
        node_mtbf_hours: Mean time between failures of one node; failures of nodes are independent.
        checkpoint_s: Seconds that a checkpoint stops training.
        restart_s: Seconds from a failure until training continues, without the work that is repeated.
        interval_s: Seconds between checkpoints; 0: the optimal interval.

    Raises:
        StepsightError: If a value is not allowed.
    """

    node_mtbf_hours: float
    checkpoint_s: float = 30.0
    restart_s: float = 600.0
    interval_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.node_mtbf_hours < math.inf:
            raise StepsightError(f"node_mtbf_hours must be a number > 0, got {self.node_mtbf_hours!r:.80}")
        for name in ("checkpoint_s", "restart_s", "interval_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StepsightError(f"{name} must be a number >= 0, got {getattr(self, name)!r:.80}")
        if not self.checkpoint_s and not self.interval_s:
            raise StepsightError("checkpoint_s must be > 0, or interval_s must state how often checkpoints are written")

    def goodput(self, nodes: int) -> dict[str, Any]:
        """Compute the share of time that is spent on training.

        Args:
            nodes: Nodes of the job.

        Returns:
            ``goodput`` (0 to 1), ``mtbf_hours`` of the job, ``checkpoint_interval_s``, and the shares of time lost to
            checkpoints, repeated work and restarts.

        Raises:
            StepsightError: If failures come faster than the job makes progress.
        """
        mtbf_s = self.node_mtbf_hours * HOUR_S / nodes
        interval = self.interval_s or math.sqrt(2.0 * self.checkpoint_s * mtbf_s)
        writing = self.checkpoint_s / (interval + self.checkpoint_s)
        repeated = min(1.0, 0.5 * (interval + self.checkpoint_s) / mtbf_s)
        restarting = min(1.0, self.restart_s / mtbf_s)
        training = (1.0 - writing) * (1.0 - repeated - restarting)
        if training <= 0:
            raise StepsightError(
                f"failures must be rarer than restarts: {nodes} nodes fail every {mtbf_s / 60:.1f} minutes, a failure "
                f"loses {(interval / 2 + self.restart_s) / 60:.1f} minutes"
            )
        return {
            "goodput": training,
            "mtbf_hours": mtbf_s / HOUR_S,
            "checkpoint_interval_s": interval,
            "lost_to_checkpoints": writing,
            "lost_to_repeated_work": repeated * (1.0 - writing),
            "lost_to_restarts": restarting * (1.0 - writing),
        }
