"""What a search evaluated: each strategy with its memory and its prediction, and all of them in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stepsight.dataset.errors import JobError
from stepsight.dataset.job import Job
from stepsight.simulator.memory import Memory
from stepsight.training.predictor.prediction import Prediction

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Choice:
    """One strategy that a search evaluated.

    Attributes:
        job: The job in this strategy.
        memory: Predicted peak memory of every stage.
        seconds: Predicted iteration time, low and high end of its interval; None where it does not fit in memory:
            such a strategy is not timed.
    """

    job: Job
    memory: Memory
    seconds: tuple[float, float, float] | None
    _predict: Callable[[Job], Prediction] = field(compare=False)

    @cached_property
    def prediction(self) -> Prediction | None:
        """The whole prediction, made when first asked for if another process evaluated the strategy."""
        return None if self.seconds is None else self._predict(self.job)

    def __repr__(self) -> str:
        memory = f"{self.memory.peak_bytes / 1e9:.1f} GB"
        time = f"{self.seconds[0]:.4g} s" if self.seconds is not None else "not timed"
        return f"Choice({self.job.name}, {time}, {memory}{'' if self.fits else ', does not fit'})"

    @property
    def fits(self) -> bool:
        """Whether the fullest stage fits in a device's memory."""
        return self.memory.fits

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key, best first: by time; those that do not fit come last, by their memory."""
        if self.seconds is None or not self.fits:
            return True, self.memory.peak_bytes
        return False, self.seconds[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the strategy, seconds (None if not timed), bytes of the fullest stage."""
        parallel, batch = self.job.parallel, self.job.batch
        time_s, low_s, high_s = self.seconds or (None, None, None)
        return {
            "tp": parallel.tp,
            "cp": parallel.cp,
            "pp": parallel.pp,
            "ep": parallel.ep,
            "dp": parallel.dp,
            "micro_batch": batch.micro_batch,
            "schedule": parallel.schedule,
            "virtual_stages": parallel.virtual_stages,
            "zero_stage": parallel.zero_stage,
            "recompute": parallel.recompute,
            "sequence_parallel": parallel.sequence_parallel,
            "iteration_time_s": time_s,
            "low_s": low_s,
            "high_s": high_s,
            "memory_bytes": self.memory.peak_bytes,
            "fits": self.fits,
        }


@dataclass
class SearchResult:
    """Distinct strategies, best first; those that do not fit in memory come last.

    Attributes:
        choices: What was evaluated in the study, and the job as it was given if it fits.
        evaluated: Number of strategies evaluated in the study, by all its processes.
        legal: Number of strategies in the space.
        own: The job as it was given.
    """

    choices: list[Choice] = field(default_factory=list)
    evaluated: int = 0
    legal: int = 0
    own: Choice | None = None

    def __repr__(self) -> str:
        best = repr(self.choices[0]) if self.choices and self.choices[0].fits else "none fits"
        return f"SearchResult({self.evaluated} of {self.legal} strategies, best: {best})"

    @property
    def best(self) -> Choice:
        """The strategy with the shortest predicted iteration that fits in memory.

        Raises:
            JobError: If none fits.
        """
        if not self.choices or not self.choices[0].fits:
            raise JobError(f"no strategy fits in memory: {self.evaluated} tried of {self.legal} legal ones")
        return self.choices[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``best`` is None if no strategy fits in memory."""
        rows = [choice.to_dict() for choice in self.choices]
        return {
            "best": rows[0] if rows and rows[0]["fits"] else None,
            "evaluated": self.evaluated,
            "legal": self.legal,
            "own": None if self.own is None else self.own.to_dict(),
            "choices": rows,
        }

    def to_frame(self) -> DataFrame:
        """A pandas table with a row for each strategy, best first; its columns are the keys of ``Choice.to_dict``."""
        from pandas import DataFrame

        return DataFrame([choice.to_dict() for choice in self.choices])
