"""Measurements of the study and their times: plans for the harness, one for each folder of a collection.

``ops`` holds what runs alike in every variant; ``eager``, and on a GPU ``compiled``, hold runs and those ops whose
kernels may be compiled.  Each has an event file ``heldout`` that judges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware
from stepsight.dataset.harness.plan import SCHEMA, check_plan
from stepsight.dataset.harness.plan_error import HarnessError
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.one_gpu import drawn_ops as sizes
from stepsight.experiments.studies.one_gpu.cases import STAND_IN, StepCase, stand_ins, step_cases
from stepsight.simulator.durations.latency_model import preset_latency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import signatures
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.planning import make_plan, stand_in_of

VARIANTS = ("eager", "compiled")
OPS = "ops"  # the collection of runs that are the same in every variant
# Steps of a run by its role.  Times of a GPU hardly vary, and building a model again takes longer than some steps.
COUNTS = {
    ("cuda", "train"): {"rounds": 1, "steps": 6, "warmup": 3, "profile_steps": 2},
    ("cuda", "heldout"): {"rounds": 2, "steps": 5, "warmup": 3, "profile_steps": 2},
    ("cpu", "train"): {"rounds": 2, "steps": 4, "warmup": 2, "profile_steps": 2},
    ("cpu", "heldout"): {"rounds": 3, "steps": 4, "warmup": 2, "profile_steps": 2},
}
FEWEST_TRAIN, FEWEST_HELDOUT = 5, 3
PARTS = (1.0, 0.75, 0.5, 0.35)  # of the runs, until enough time is left for ops
FEWEST_COMPILED = 40  # ops that no run needs
LEAST_EVENTS = 0.3  # share of all time for ops
SEED = 0


@dataclass(frozen=True)
class Costs:
    """Overheads of measuring, in seconds; rules of thumb, rather too large than too small.

    Attributes:
        launch: To start the harness.
        round: To build a model.
        profile: To write a run's traces.
        step: Least of a training step.
        compile: For the kernels of a run.
        op: For an op.
        compiled_op: For a compiled one.
    """

    launch: float
    round: float
    profile: float
    step: float
    compile: float
    op: float
    compiled_op: float


COSTS = {
    "cuda": Costs(launch=20.0, round=1.5, profile=4.0, step=0.02, compile=8.0, op=0.08, compiled_op=0.8),
    "cpu": Costs(launch=6.0, round=0.2, profile=0.8, step=0.01, compile=30.0, op=0.09, compiled_op=20.0),
}
MINUTES = {"cuda": 10.0, "cpu": 3.0}
MOST_MINUTES = 240.0


@dataclass(frozen=True)
class Study:
    """What to measure.

    Attributes:
        device: ``cuda`` or ``cpu``.
        plans: For the harness, by the name of their collection.
        seconds: That each is thought to take.
    """

    device: str
    plans: dict[str, dict[str, Any]]
    seconds: dict[str, float]


def make_study(device: str, hardware: str, minutes: float) -> Study:
    """Make plans that take at most about this many minutes.

    Args:
        device: ``cuda`` or ``cpu``.
        hardware: What jobs call it.
        minutes: All launches of the harness together.

    Raises:
        CollectError: If there is too little time, or the harness cannot run a job.
    """
    if not 0 < minutes <= MOST_MINUTES:
        raise CollectError(f"minutes must be > 0 and at most {MOST_MINUTES:g}, got {minutes:g}")
    preset, costs = facts(device, hardware), COSTS[device]
    variants = VARIANTS if device == "cuda" else VARIANTS[:1]
    fixed: dict[str, float] = {}
    for part in PARTS:
        chosen = {name: _chosen(device, hardware, name, part) for name in variants}
        fixed = {name: costs.launch + _runs_s(of, preset, costs, name) for name, of in chosen.items()}
        left = 60 * minutes - costs.launch - sum(fixed.values())
        if left >= LEAST_EVENTS * 60 * minutes:
            break
    else:
        least = (costs.launch + sum(fixed.values())) / (1 - LEAST_EVENTS) / 60
        raise CollectError(f"minutes must be >= {least:.1f} for the fewest runs that teach anything, got {minutes:g}")
    space = sizes.GPU if device == "cuda" else sizes.CPU
    space = replace(space, dtypes={name: part for name, part in space.dtypes.items() if name in preset.peak_flops})
    compiled = _compiled_ops(chosen, space, preset, left, costs)
    compiled_s = costs.compiled_op * sum(map(len, compiled))
    drawn = sizes.draw(space, int((left - compiled_s) / costs.op), preset, SEED)
    train, heldout = sizes.split(drawn, *_asked(chosen["eager"], preset), SEED)
    own = sizes.VARIANT_FAMILIES
    halves = {
        OPS: tuple([op for op in half if op.family not in own] for half in (train, heldout)),
        "eager": tuple([op for op in half if op.family in own] for half in (train, heldout)),
    }
    each = (left - compiled_s) / (len(train) + len(heldout))
    seconds = {name: each * sum(map(len, of)) for name, of in halves.items()}
    if "compiled" in variants:
        halves["compiled"], seconds["compiled"] = compiled, compiled_s
    plans = {name: _plan(device, name, chosen.get(name, []), *of, seconds=seconds[name]) for name, of in halves.items()}
    return Study(device, plans, {name: fixed.get(name, costs.launch) + seconds[name] for name in plans})


def facts(device: str, hardware: str) -> Hardware:
    """A preset for estimates of durations: the hardware's own, if there is one."""
    found = find_hardware(hardware) or find_hardware("h200-sxm-141gb" if device == "cuda" else "local-cpu")
    assert found is not None
    return found


def _chosen(device: str, hardware: str, variant: str, part: float) -> list[StepCase]:
    """Runs of a variant, the first of each role; emulated ranks run once, eager."""
    found = [case for case in step_cases(device, hardware) if variant == "eager" or case.compiled]
    train, heldout = ([case for case in found if case.role == role] for role in ("train", "heldout"))
    kept = train[: max(FEWEST_TRAIN, round(part * len(train)))]
    kept += heldout[: max(FEWEST_HELDOUT, round(part * len(heldout)))]
    return kept + (stand_ins(device, hardware) if variant == "eager" else [])


def _counts(device: str, case: StepCase) -> dict[str, Any]:
    if case.role == STAND_IN:
        return {**COUNTS[device, "heldout"], "stand_in": stand_in_of(case.job, case.rank)}
    return dict(COUNTS[device, case.role])


def _runs_s(chosen: Sequence[StepCase], hardware: Hardware, costs: Costs, variant: str) -> float:
    """Estimated seconds of runs."""
    whole = 0.0
    for case in chosen:
        counts = _counts("cpu" if hardware.kind == "cpu" else "cuda", case)
        latency = preset_latency(hardware.name, case.job.fabric)
        assert latency is not None
        step = max(costs.step, simulate(_on(case.job, hardware), latency).iteration_time_s)
        steps = counts["rounds"] * (counts["steps"] + counts["warmup"]) + counts["profile_steps"] + 1
        whole += counts["rounds"] * costs.round + costs.profile + steps * step
        whole += costs.compile if variant == "compiled" else 0.0
    return whole


def _on(job: Job, hardware: Hardware) -> Job:
    tables = job.to_dict()
    tables["cluster"]["hardware"] = hardware.name
    return Job.from_dict(tables)


def _asked(chosen: Sequence[StepCase], hardware: Hardware) -> tuple[list[Op], list[Op]]:
    """Ops of the training runs, and of the held-out ones."""
    return tuple(  # type: ignore[return-value]
        sorted({op for case in chosen if case.role == role for op in signatures(case.job, hardware)[0]}, key=str)
        for role in ("train", "heldout")
    )


def _compiled_ops(
    chosen: dict[str, list[StepCase]], space: sizes.OpSpace, hardware: Hardware, left: float, costs: Costs
) -> tuple[list[Op], list[Op]]:
    """Ops of the compiled variant, in about a third of the remaining time: those of its runs, and more."""
    if "compiled" not in chosen:
        return [], []
    most = int(left / 3 / costs.compiled_op)
    needed, unseen = (
        [op for op in ops if op.family in sizes.VARIANT_FAMILIES] for ops in _asked(chosen["compiled"], hardware)
    )
    drawn = sizes.draw(space, max(FEWEST_COMPILED, most - len(needed)), hardware, SEED + 1, sizes.VARIANT_FAMILIES)
    return sizes.split(drawn, needed, unseen, SEED + 1)


def _plan(
    device: str, variant: str, chosen: Sequence[StepCase], train: Sequence[Op], heldout: Sequence[Op], *, seconds: float
) -> dict[str, Any]:
    plan = make_plan([(case.role, case.job, _counts(device, case)) for case in _in_turns(chosen)])
    plan["events"] = [
        {
            "name": name,
            "world_size": 1,
            "ops": [asdict(op) for op in sorted(ops, key=str)],
            "collectives": [],
            "seconds": seconds * len(ops) / (len(train) + len(heldout)),
        }
        for name, ops in (("train", train), (HELDOUT, heldout))
        if ops
    ]
    plan["device"] = device
    if variant == "compiled":
        plan["compile"] = True
    try:
        return check_plan(json.loads(json.dumps({**plan, "schema": SCHEMA})))
    except HarnessError as error:
        raise CollectError(f"plan {variant}: {error}") from None


def _in_turns(chosen: Sequence[StepCase]) -> list[StepCase]:
    """Training and held-out runs alternate, so that a drift of the device affects both equally; then the others."""
    places: list[tuple[float, str, StepCase]] = [(1.0, STAND_IN, case) for case in chosen if case.role == STAND_IN]
    for role in ("train", "heldout"):
        own = [case for case in chosen if case.role == role]
        places += [((index + (role == "heldout") / 2) / len(own), role, case) for index, case in enumerate(own)]
    return [case for _, _, case in sorted(places, key=lambda place: place[:2])]
