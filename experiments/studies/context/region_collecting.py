"""Collect measured regions: compile, run on one thread, keep what Inductor fused and how long it took."""

from __future__ import annotations

import gc
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import read_json, write_text
from stepsight.dataset.harness.regions.fused_regions import run_regions
from stepsight.dataset.harness.regions.region_record import Region
from stepsight.experiments.studies.context.more_families import FAMILIES
from stepsight.experiments.studies.context.region_families import Dice
from stepsight.experiments.studies.context.unseen_families import UNSEEN

BATCH_S, BATCHES = 1e-3, 30  # of one measurement
MOST_S = 0.5
QUIET = (
    10  # percentile of batches that counts: other programs of the machine make calls slower, none makes them quicker
)


@dataclass(frozen=True)
class MeasuredRegion:
    """A region and its time.

    Attributes:
        family: Of the random regions.
        number: Within the family; the regions of one number are the forward and the backward of one function.
        region: What was compiled.
        seconds: CPU time of a call, on one thread.
        seconds_again: The same, measured later.
        calls: Seconds of each compiled function by its name.
    """

    family: str
    number: int
    region: Region
    seconds: float
    seconds_again: float
    calls: Mapping[str, float]


def read_collected(folder: Path) -> list[MeasuredRegion]:
    """Regions of a folder.

    Raises:
        TraceError: If there are none.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        values = read_json(path)
        for each in values["regions"]:
            region = Region.from_dict(each["region"])
            times = each["seconds"], each["seconds_again"], each["calls"]
            found.append(MeasuredRegion(values["family"], values["number"], region, *times))
    if not found:
        raise TraceError(f"{folder} must hold collected regions, got none: run with --collect first")
    return found


def collect(
    folder: Path, each: int, until: Callable[[], bool] = lambda: False, families: Iterable[str] = FAMILIES
) -> int:
    """Measure ``each`` functions of every family that are not yet in the folder; returns how many were added."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    wanted = [(name, number) for number in range(each) for name in families]
    missing = [(name, number) for name, number in wanted if not (folder / f"{name}-{number}.json").exists()]
    held: list[tuple[Path, dict[str, Any], list[_Timed]]] = []
    for done, (name, number) in enumerate(missing):
        if until():
            break
        print(f"{done}/{len(missing)} {name} {number}", file=sys.stderr, flush=True)
        path = folder / f"{name}-{number}.json"
        try:
            timed = list(_measured(name, number))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            print(f"  left out: {error!s:.200}", file=sys.stderr)
            write_text(path, json.dumps({"family": name, "number": number, "regions": [], "error": str(error)[:300]}))
            continue
        for each_held in held:
            _write(*each_held)
        held = [(path, {"family": name, "number": number}, timed)]
    for each_held in held:
        _write(*each_held)
    return len(missing)


class _Timed:
    """A compiled region with the arguments of its first call."""

    def __init__(self, region: Region, made: Any) -> None:
        self.region = region
        self.arguments: list[Any] = []
        self.call = made.current_callable
        self.seconds = 0.0
        self.calls: dict[str, float] = {}

        def first(arguments: list[Any]) -> Any:
            if not self.arguments:
                self.arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
            return self.call(arguments)

        made.current_callable = first

    def measure(self) -> float:
        """CPU seconds of a call: a low percentile of batches."""
        return _seconds(lambda: self.call(list(self.arguments)))

    def measure_calls(self) -> dict[str, float]:
        """CPU seconds of each compiled function within the region."""
        space = self.call.__globals__ if hasattr(self.call, "__globals__") else self.call.__func__.__globals__
        kernels = {name: value for name, value in space.items() if name.startswith("cpp_fused") and callable(value)}
        spent: dict[str, list[float]] = {name: [] for name in kernels}

        def timing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                begin = time.thread_time_ns()
                result = kernel(*arguments)
                spent[name].append((time.thread_time_ns() - begin) / 1e9)
                return result

            return run

        space.update({name: timing(name, kernel) for name, kernel in kernels.items()})
        try:
            until = time.perf_counter() + 0.2
            for round_number in range(200):
                self.call(list(self.arguments))
                if round_number >= 8 and time.perf_counter() > until:
                    break
        finally:
            space.update(kernels)
        return {name: float(np.percentile(times, QUIET)) for name, times in spent.items() if times}


def _seconds(call: Callable[[], Any]) -> float:
    call()
    begin = time.thread_time()
    call()
    once = max(time.thread_time() - begin, 1e-6)
    repeats = max(1, int(BATCH_S / once))
    times, start = [], time.perf_counter()
    for _ in range(BATCHES):
        begin = time.thread_time()
        for _ in range(repeats):
            call()
        times.append((time.thread_time() - begin) / repeats)
        if len(times) >= 5 and time.perf_counter() - start > MOST_S:
            break
    return float(np.percentile(times, QUIET))


def _measured(name: str, number: int) -> Iterator[_Timed]:
    draw = {**FAMILIES, **UNSEEN}[name](Dice(f"{name} {number} {zlib.crc32(name.encode())}"))
    timed: list[_Timed] = []

    def add(region: Region, made: Any) -> None:
        timed.append(_Timed(region, made))

    run_regions(draw.function, draw.inputs, add, training=draw.training)
    for each in timed:
        if each.arguments:
            with torch.no_grad():
                each.seconds, each.calls = each.measure(), each.measure_calls()
            yield each


def _write(path: Path, about: dict[str, Any], timed: list[_Timed]) -> None:
    """Measure once more and write."""
    regions = []
    for each in timed:
        with torch.no_grad():
            again = each.measure()
        regions.append(
            {"region": each.region.to_dict(), "seconds": each.seconds, "seconds_again": again, "calls": each.calls}
        )
    write_text(path, json.dumps({**about, "regions": regions}, separators=(",", ":")))
    gc.collect()
