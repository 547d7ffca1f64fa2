"""Settings of a search, as Python callers and the command line state them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from stepsight.dataset.base.errors import StepsightError

SAMPLERS = ("auto", "enumerate", "tpe", "random")
MOST_SEED = 2**31  # samplers take 32 bits, and a continued study adds its trials


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How far a search goes, in which order, and where its study is kept.

    Attributes:
        trials: Stop when the study has this many evaluated strategies; those of earlier searches and of other
            processes count. Default: no limit. If scenarios are compared, the limit is for each of them.
        timeout_s: Stop after this many seconds.
        gap: Stop when the best strategy is proved to be within this many percent of the optimum.
        top: Number of best strategies to find and prove; of combinations, if several are searched.
        sampler: Order in which strategies are predicted. auto: by lower bounds, until the best is proved. enumerate:
            every legal strategy. tpe: Optuna's sampler. random: at random. tpe and random stop after 200 strategies
            unless the number of trials is given.
        seed: Seed of the sampler.
        storage: Study storage: a database URL or the path of a journal file; default: memory. Several searches may
            share a study in SQLite, PostgreSQL or a journal.
        study_name: Name of the study in the storage; an existing study continues.

    Raises:
        StepsightError: If a value is not allowed.
    """

    trials: int | None = None
    timeout_s: float | None = None
    gap: float = 0.0
    top: int = 1
    sampler: str = "auto"
    seed: int = 0
    storage: str | None = None
    study_name: Annotated[str | None, "--study"] = None

    def __post_init__(self) -> None:
        for name, kind in (("seed", int), ("trials", int), ("top", int), ("timeout_s", float), ("gap", float)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | kind)):
                raise StepsightError(f"{name} must be a {'whole ' * (kind is int)}number, got {value!r:.80}")
        if self.storage is not None and not isinstance(self.storage, str):
            raise StepsightError(f"storage must be a database URL or the path of a journal, got {self.storage!r:.80}")
        if not 0 <= self.seed <= MOST_SEED:
            raise StepsightError(f"seed must be {'>= 0' if self.seed < 0 else f'<= {MOST_SEED}'}, got {self.seed}")
        if self.trials is not None and self.trials < 1:
            raise StepsightError(f"trials must be >= 1, got {self.trials}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise StepsightError(f"timeout_s must be > 0, got {self.timeout_s}")
        if self.top < 1:
            raise StepsightError(f"top must be >= 1, got {self.top}")
        if not 0 <= self.gap < math.inf:
            raise StepsightError(f"gap must be a number of percent >= 0, got {self.gap}")
        if self.sampler not in SAMPLERS:
            raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {self.sampler!r:.80}")
        if self.study_name is not None and self.storage is None:
            raise StepsightError(f"a study is kept in a storage: state storage with the study {self.study_name!r:.80}")
