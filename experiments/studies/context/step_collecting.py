"""Collect compiled training steps: models of many families, forward and backward compiled, an eager optimizer."""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepsight.dataset.base.errors import TraceError
from stepsight.dataset.base.files import read_json, write_text
from stepsight.dataset.harness.regions.fused_regions import SETTINGS, reading_backend
from stepsight.dataset.harness.regions.region_record import Region
from stepsight.experiments.studies.architectures.family_script import FAMILIES, optimizer_of

MODELS = (
    "perceptron", "gpt", "resnet", "mixer", "autoencoder", "llama", "convnext", "bert", "unet", "linear_attention",
    "mobilenet", "vit", "gmlp", "deepfm", "swin", "perceiver",
)  # fmt: skip
WARM_UP, MOST_STEPS, MOST_S = 3, 60, 3.0
QUIET = 20  # percentile of the steps that counts


@dataclass(frozen=True)
class MeasuredStep:
    """A compiled training step.

    Attributes:
        family: Of the model.
        size: Its configuration.
        regions: What was compiled, in order of compilation.
        step_s: CPU seconds of a step on one thread.
        again_s: The same, measured later.
        eager_s: The same without a compiler.
        optimizer_s: Of the optimizer within a compiled step.
        region_s: Of each region's calls within a step.
        kernel_s: By region, seconds of all calls of each compiled function within a step.
    """

    family: str
    size: int
    regions: tuple[Region, ...]
    step_s: float
    again_s: float
    eager_s: float
    optimizer_s: float
    region_s: tuple[float, ...]
    kernel_s: tuple[Mapping[str, float], ...]

    @property
    def name(self) -> str:
        return f"{self.family}-{self.size}"


def read_steps(folder: Path) -> list[MeasuredStep]:
    """Steps of a folder.

    Raises:
        TraceError: If there are none.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        values = read_json(path)
        if "error" not in values:
            regions = tuple(map(Region.from_dict, values.pop("regions")))
            region_s, kernel_s = tuple(values.pop("region_s")), tuple(values.pop("kernel_s"))
            found.append(MeasuredStep(**values, regions=regions, region_s=region_s, kernel_s=kernel_s))
    if not found:
        raise TraceError(f"{folder} must hold collected steps, got none: run with --collect first")
    return found


def collect_steps(folder: Path, sizes: Sequence[int], families: Sequence[str] = MODELS) -> None:
    """Measure compiled steps that are not yet in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    asked = [(family, size) for size in sizes for family in families]
    left = [each for each in asked if not (folder / f"{each[0]}-{each[1]}.json").exists()]
    for done, (family, size) in enumerate(left):
        print(f"{done}/{len(left)} {family} {size}", file=sys.stderr, flush=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = _measured(family, size)
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            print(f"  left out: {error!s:.200}", file=sys.stderr)
            values = {"family": family, "size": size, "error": str(error)[:300]}
        write_text(folder / f"{family}-{size}.json", json.dumps(values, separators=(",", ":")))
        gc.collect()


def _measured(family: str, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, loss_of = FAMILIES[family](size)
    optimizer = optimizer_of(family, model)
    made: list[tuple[Region, Any]] = []
    backend = reading_backend(lambda region, code: made.append((region, code)), training=True, compiled=True)
    with torch._inductor.config.patch(SETTINGS), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(loss_of, backend=backend, dynamic=False)
        _step(compiled, optimizer)
        first = _seconds(lambda: _step(compiled, optimizer))
        eager = _seconds(lambda: _step(loss_of, optimizer))
        again = _seconds(lambda: _step(compiled, optimizer))
        inside = _inside(compiled, optimizer, [code for _, code in made])
    return {
        "family": family, "size": size, "regions": [region.to_dict() for region, _ in made], "step_s": first,
        "again_s": again, "eager_s": eager, **inside,
    }  # fmt: skip


def _step(loss_of: Callable[[], Any], optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def _seconds(step: Callable[[], None]) -> float:
    for _ in range(WARM_UP):
        step()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < MOST_STEPS and (len(times) < 8 or time.perf_counter() - begin < MOST_S):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return float(np.percentile(times, QUIET))


class _Spent:
    """CPU seconds by name, of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds taken."""

        def run(*given: Any, **named: Any) -> Any:
            begin = time.thread_time_ns()
            result = function(*given, **named)
            spent = (time.thread_time_ns() - begin) / 1e9
            self.steps[-1][name] = self.steps[-1].get(name, 0.0) + spent
            return result

        return run

    def usual(self, name: str) -> float:
        """A low percentile over steps."""
        return float(np.percentile([step.get(name, 0.0) for step in self.steps], QUIET))


def _inside(compiled: Callable[[], Any], optimizer: Any, codes: Sequence[Any]) -> dict[str, Any]:
    """Seconds of compiled functions, of regions and of the optimizer, each measured in runs of its own."""
    kernels: list[dict[str, float]] = []
    spent, spaces = _Spent(), []
    for place, code in enumerate(codes):
        call = code.current_callable
        space = call.__globals__ if hasattr(call, "__globals__") else call.__func__.__globals__
        own = {name: value for name, value in space.items() if name.startswith("cpp_fused") and callable(value)}
        spaces.append((space, own))
        space.update({name: spent.of(f"{place} {name}", value) for name, value in own.items()})
    _steps(spent, lambda: _step(compiled, optimizer))
    for place, (space, own) in enumerate(spaces):
        space.update(own)
        kernels.append({name: spent.usual(f"{place} {name}") for name in own})
    whole, plain = _Spent(), [code.current_callable for code in codes]
    for place, code in enumerate(codes):
        code.current_callable = whole.of(str(place), code.current_callable)

    def step() -> None:
        optimizer.zero_grad()
        compiled().backward()
        whole.of("optimizer", optimizer.step)()

    _steps(whole, step)
    for code, call in zip(codes, plain, strict=True):
        code.current_callable = call
    regions = [whole.usual(str(place)) for place in range(len(codes))]
    return {"kernel_s": kernels, "region_s": regions, "optimizer_s": whole.usual("optimizer")}


def _steps(spent: _Spent, step: Callable[[], None]) -> None:
    begin = time.perf_counter()
    while len(spent.steps) < MOST_STEPS // 2 and (len(spent.steps) < 6 or time.perf_counter() - begin < MOST_S / 2):
        spent.steps.append({})
        step()
