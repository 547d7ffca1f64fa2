"""The stages of a user's script: warm-up steps, timed ones without a profiler, then traced ones."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ..base import annotate, cores
from ..base.atomic_files import write_json
from ..base.collective_calls import barrier
from ..measuring.measure import StepClock, StepTracer
from .step_marks import StepMarks
from .world import EmulatedWorld

RESULT = "script_rank{}.json"  # file that one rank writes when it has finished


class Stages:
    """Goes through the stages of a script on one rank; ``step_ended`` is called at the end of each of its steps.

    ``settings`` are ``warmup``, ``rounds``, ``steps`` (of each round), ``profile_steps`` and ``out``, where results go.
    ``say`` is told what goes on; ``leave`` ends the process when all is written.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        rank: int,
        say: Callable[[str], None],
        leave: Callable[[], None],
        world: EmulatedWorld | None = None,
    ) -> None:
        self._settings, self.rank, self._say, self._leave, self._world = settings, rank, say, leave, world
        self._alone = world is None and "box" not in settings and "WORLD_SIZE" not in os.environ
        self._collectives: list[dict[str, Any]] = []
        self.marks = StepMarks(self.step_ended, self._restart)
        self._step: AbstractContextManager[Any] | None = None
        self._tracer: StepTracer | None = None
        self._clock: StepClock | None = None
        self._restart()

    @property
    def traces(self) -> bool:
        """Whether steps are traced after the timed ones."""
        return bool(self._settings["profile_steps"])

    @property
    def needed(self) -> int:
        """Number of steps that a script must run before its steps can be identified."""
        wanted = self._settings
        traced = wanted["profile_steps"] + 1 if wanted["profile_steps"] else 0
        return int(1 + wanted["warmup"] + wanted["rounds"] * wanted["steps"] + traced)

    def _restart(self) -> None:
        self._close()
        self._warm, self._rounds, self._clock = 0, list[list[float]](), None

    def _close(self) -> None:
        """End an open traced step."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._tracer is not None:
            self._tracer.__exit__()
            self._tracer = None

    def step_ended(self) -> None:
        """The end of a step is the begin of the next one."""
        wanted = self._settings
        if self._tracer is not None:
            self._traced(self._tracer)
        elif self._warm < wanted["warmup"]:
            self._warm += 1
            self._say(f"warm-up step {self._warm}/{wanted['warmup']}")
        if self._warm == wanted["warmup"] and self._tracer is None:
            self._timed()

    def _timed(self) -> None:
        """Mark the end of a timed step; begin a round, or the traces."""
        wanted = self._settings
        if self._clock is not None:
            self._clock.mark()
            seconds = self._clock.seconds()
            if len(seconds) < wanted["steps"]:
                return
            self._rounds.append(seconds)
            if self._world is not None:
                self._collectives = self._world.collectives()
        if len(self._rounds) < wanted["rounds"]:
            self._say(f"round {len(self._rounds) + 1}/{wanted['rounds']}")
            self._meet()
            if not self._rounds and self._alone:
                cores.compute_in_real_time()
            if self._world is not None and not self._rounds:
                self._world.forget()
            self._clock = StepClock(device(), self._world.now if self._world is not None else time.perf_counter)
            self._clock.mark()
        elif wanted["profile_steps"]:
            self._say("traced steps")
            self._tracer = StepTracer(device(), wanted["profile_steps"], Path(wanted["out"]), self.rank)
            self._tracer.__enter__()
            self._begin(self._tracer)
        else:
            self._finish([], {})

    def _meet(self) -> None:
        """Wait for all ranks."""
        (barrier if self._world is None else self._world.meet)()

    def _begin(self, tracer: StepTracer) -> None:
        tracer.begin()
        self._step = annotate.segment("step")
        self._step.__enter__()

    def _traced(self, tracer: StepTracer) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        tracer.end()
        if tracer.left:
            self._begin(tracer)
            return
        self._close()
        self._finish(*tracer.written())

    def _finish(self, profiled: list[float], names: dict[str, str]) -> None:
        """Write this rank's measurements, and end the process after all ranks have finished."""
        folder = Path(self._settings["out"])
        digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names.values()}
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
        found = {
            "rank": self.rank, "steps_by": self.marks.kind, "rounds": self._rounds, "profiled_seconds": profiled,
            "traces": names, "digests": digests, "device": device().type, "threads": torch.get_num_threads(),
            "peak_memory_bytes": memory,
        }  # fmt: skip
        if self._world is not None:
            found["collectives"] = self._collectives
        write_json(folder / RESULT.format(self.rank), found)
        self._meet()
        self._leave()


def device() -> torch.device:
    """The device of the script."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
