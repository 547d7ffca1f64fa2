"""Cells that a row leaves open although they matter: the values that they may have, each of which is predicted.

A row with pipeline stages whose framework usually interleaves may have run either way, so may one without a word about
recomputation where the framework's policy decides.  All of their jobs are predicted, and the interval holds them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.job.frameworks import Framework
from stepsight.experiments.evaluation.runs_table import Row
from stepsight.simulator.memory import estimate_memory

VOCABULARIES = (32000, 256000)  # Llama 2's, and the largest usual one (Gemma, Nemotron)
MICRO_BATCHES = (1, 2, 4, 8)
MOST_OPEN = 2  # cells: with more, the run is unknown

Choice = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Open:
    """Cells of a row that are open: by column the values that they may have."""

    values: Mapping[str, tuple[Any, ...]]

    def choices(self) -> Iterator[Choice]:
        """Every combination of values; a single empty one if nothing is open."""
        for values in itertools.product(*self.values.values()):
            yield dict(zip(self.values, values, strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{name} ({' or '.join(map(str, values))})" for name, values in self.values.items())


NOTHING_OPEN = Open({})


def open_cells(row: Row, framework: Framework, *, vocab_known: bool, dp: int) -> Open:
    """The cells of a row that are open.

    Args:
        row: A measured run.
        framework: The profile of what ran it.
        vocab_known: Whether the row or the model's name tells the vocabulary.
        dp: Replicas.
    """
    found: dict[str, tuple[Any, ...]] = {}
    if not vocab_known:
        found["vocab"] = VOCABULARIES
    if not row.text("recompute") and not framework.recompute:
        found["recompute"] = ("none", "selective", "full")
    if row.whole("micro_batch") is None and (batch := row.whole("global_batch")):
        found["micro_batch"] = tuple(size for size in MICRO_BATCHES if batch % (size * dp) == 0) or (1,)
    if not row.text("zero_stage") and dp > 1:
        found["zero_stage"] = ("0", "1")
    stages, layers = row.whole("pp") or 1, row.whole("layers") or 0
    finest = layers // stages
    if stages > 1 and not row.text("vp") and framework.interleaves and finest > 1 and layers % stages == 0:
        found["vp"] = (1, finest)
    return Open(found)


def possible(choices: Iterator[Choice], build: Callable[[Choice], Any]) -> list[Any]:
    """What is built for each choice: those that break no rule and, where some fit the devices' memory, those that fit.

    Raises:
        JobError: If every choice breaks a rule; the first one's.
    """
    built, first = [], None
    for choice in choices:
        try:
            built.append(build(choice))
        except JobError as error:
            first = first or error
    if not built and first is not None:
        raise first
    return [one for one in built if len(built) == 1 or _fits(one.job)] or built


def _fits(job: Any) -> bool:
    hardware = find_hardware(job.cluster.hardware)
    return hardware is None or estimate_memory(job, hardware).fits
