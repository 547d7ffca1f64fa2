"""Runs of the study and measurements of ops, as plans for the harness: one for each folder of a collection.

``ops`` holds what runs alike in every variant; ``eager``, and on a GPU ``compiled``, hold runs and those ops whose
kernels may be compiled.  Each has an event file ``heldout`` that judges.  A held-out run has a hidden size, products'
(n, k), a vocabulary, a sequence and a number and size of micro-batches that no training run has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from stepsight.dataset.base.errors import CollectError, JobError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware, roofline_seconds, usual_fabric
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.demo.demo import sized_job
from stepsight.experiments.studies.study import cases
from stepsight.simulator.durations.latency_model import preset_latency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import signatures
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.planning import checked_plan, event_row, make_plan, stand_in_of

STAND_IN = "stand-in"  # role of a run of one rank of a large job
CPU = "local-cpu"
ASSUMED_FABRIC = "dgx-a100"  # for emulated ranks on an unknown GPU: the delays of their collectives follow from it


@dataclass(frozen=True, slots=True)
class StepCase:
    """One run."""

    job: Job
    role: str  # train, heldout or STAND_IN
    compiled: bool = False  # it also runs with compiled kernels
    rank: int = 0  # the one that runs, of a stand-in


def step_cases(device: str, hardware: str) -> list[StepCase]:
    """Runs of a device: ``cuda`` in pure bf16 on some hardware, or ``cpu`` in fp32 (``local-cpu``), on one rank; and
    single ranks of jobs that are larger than this machine.
    """
    runs = cases("one-gpu")[device]
    fabric = usual_fabric(hardware) if find_hardware(hardware) is not None else ASSUMED_FABRIC
    shared = {"hardware": hardware, "fabric": fabric, "precision": "pure-bf16" if device == "cuda" else "fp32"}

    def job(sizes: Any, parallel: dict[str, Any], nodes: int = 1) -> Job:
        *model, micro_batch, number = sizes
        return sized_job(model, parallel, (micro_batch, number), nodes=nodes, **shared)

    found = [
        StepCase(job(sizes, {"recompute": "full"} if "recompute" in words else {}), role, "compiled" in words)
        for role in ("train", "heldout")
        for *sizes, words in runs[role]
    ]
    large = [StepCase(job(*of), STAND_IN, rank=rank) for *of, rank in runs["stand_ins"]]
    return [replace(case, compiled=case.compiled and device == "cuda") for case in found] + large


VARIANTS = ("eager", "compiled")
OPS = "ops"  # the collection of runs that are the same in every variant
FEWEST_TRAIN, FEWEST_HELDOUT = 5, 3
PARTS = (1.0, 0.75, 0.5, 0.35)  # of the runs, until enough time is left for ops
FEWEST_COMPILED = 40  # ops that no run needs
LEAST_EVENTS = 0.3  # share of all time for ops
SEED = 0
MOST_MINUTES = 240.0


class Study(NamedTuple):
    """What to measure."""

    plans: dict[str, dict[str, Any]]  # for the harness, by the name of their collection
    seconds: dict[str, float]  # that each is thought to take


def make_study(device: str, hardware: str, minutes: float) -> Study:
    """Make plans that take at most about this many minutes."""
    if not 0 < minutes <= MOST_MINUTES:
        raise CollectError(f"minutes must be > 0 and at most {MOST_MINUTES:g}, got {minutes:g}")
    preset, costs = facts(device, hardware), cases("one-gpu")[device]["costs"]
    variants = VARIANTS if device == "cuda" else VARIANTS[:1]
    fixed: dict[str, float] = {}
    for part in PARTS:
        chosen = {name: _chosen(device, hardware, name, part) for name in variants}
        fixed = {name: costs["launch"] + _runs_s(of, preset, costs, name) for name, of in chosen.items()}
        left = 60 * minutes - costs["launch"] - sum(fixed.values())
        if left >= LEAST_EVENTS * 60 * minutes:
            break
    else:
        least = math.ceil(10 * (costs["launch"] + sum(fixed.values())) / (1 - LEAST_EVENTS) / 60) / 10
        raise CollectError(f"minutes must be >= {least:.1f} for the fewest runs that teach anything, got {minutes:g}")
    space, own = op_space(device), VARIANT_FAMILIES
    space.dtypes = {name: part for name, part in space.dtypes.items() if name in preset.peak_flops}
    compiled: tuple[list[Op], list[Op]] = ([], [])
    if "compiled" in variants:  # ops of its runs, and more, in about a third of the remaining time
        needed, unseen = ([op for op in ops if op.family in own] for ops in _asked(chosen["compiled"], preset))
        more = max(FEWEST_COMPILED, int(left / 3 / costs["compiled_op"]) - len(needed))
        compiled = split(draw(space, more, preset, SEED + 1, own), needed, unseen, SEED + 1)
    compiled_s = costs["compiled_op"] * sum(map(len, compiled))
    drawn = draw(space, int((left - compiled_s) / costs["op"]), preset, SEED)
    halves = split(drawn, *_asked(chosen["eager"], preset), SEED)
    each = (left - compiled_s) / sum(map(len, halves))
    plans, seconds = dict[str, dict[str, Any]](), dict[str, float]()
    for name in (OPS, *variants):
        train, heldout = ([op for op in half if (op.family in own) == (name == "eager")] for half in halves)
        ops = compiled if name == "compiled" else (train, heldout)
        ops_s = compiled_s if name == "compiled" else each * sum(map(len, ops))
        plans[name] = _plan(device, name, chosen.get(name, []), ops, ops_s)
        seconds[name] = fixed.get(name, costs["launch"]) + ops_s
    return Study(plans, seconds)


def facts(device: str, hardware: str) -> Hardware:
    """A preset for estimates of durations: the hardware's own, if there is one."""
    found = find_hardware(hardware) or find_hardware("h200-sxm-141gb" if device == "cuda" else "local-cpu")
    assert found is not None
    return found


def _chosen(device: str, hardware: str, variant: str, part: float) -> list[StepCase]:
    """Runs of a variant, the first of each role, which alternate, so that a drift of the device affects both equally;
    emulated ranks run once, eager, at the end.
    """
    places: list[tuple[float, str, StepCase]] = []
    found = [case for case in step_cases(device, hardware) if variant == "eager" or case.compiled]
    for role, fewest in (("train", FEWEST_TRAIN), ("heldout", FEWEST_HELDOUT)):
        own = [case for case in found if case.role == role]
        own = own[: max(fewest, round(part * len(own)))]
        places += [((index + (role == "heldout") / 2) / len(own), role, case) for index, case in enumerate(own)]
    kept = [case for _, _, case in sorted(places, key=lambda place: place[:2])]
    return kept + [case for case in found if case.role == STAND_IN]


def _counts(device: str, case: StepCase) -> dict[str, Any]:
    counts = cases("one-gpu")[device]["counts"]["train" if case.role == "train" else "heldout"]
    return {**counts, **({"stand_in": stand_in_of(case.job, case.rank)} if case.role == STAND_IN else {})}


def _runs_s(chosen: Sequence[StepCase], hardware: Hardware, costs: Mapping[str, float], variant: str) -> float:
    """Estimated seconds of runs."""
    whole = 0.0
    for case in chosen:
        counts = _counts("cpu" if hardware.kind == "cpu" else "cuda", case)
        job = replace(case.job, cluster=replace(case.job.cluster, hardware=hardware.name))
        latency = preset_latency(hardware.name, job.fabric)
        assert latency is not None
        step = max(costs["step"], simulate(job, latency).iteration_time_s)
        steps = counts["rounds"] * (counts["steps"] + counts["warmup"]) + counts["profile_steps"] + 1
        whole += counts["rounds"] * costs["round"] + costs["profile"] + steps * step
        whole += costs["compile"] if variant == "compiled" else 0.0
    return whole


def _asked(chosen: Sequence[StepCase], hardware: Hardware) -> tuple[list[Op], list[Op]]:
    """Ops of the training runs, and of the held-out ones."""
    signed = [(case.role, signatures(case.job, hardware)[0]) for case in chosen if case.role != STAND_IN]
    roles = ("train", "heldout")
    train, heldout = (sorted({op for own, ops in signed if own == role for op in ops}, key=str) for role in roles)
    return train, heldout


def _plan(
    device: str, variant: str, chosen: Sequence[StepCase], ops: tuple[Sequence[Op], Sequence[Op]], seconds: float
) -> dict[str, Any]:
    """The plan of a collection; ``ops``: those that teach and those that judge."""
    plan = make_plan([(case.role, case.job, _counts(device, case)) for case in chosen])
    events = [
        event_row(1, sorted(half, key=str), [], seconds * len(half) / sum(map(len, ops)), name)
        for name, half in zip(("train", HELDOUT), ops, strict=True)
        if half
    ]
    return checked_plan(plan["runs"], events, device=device, **({"compile": True} if variant == "compiled" else {}))


HELDOUT_PART = 0.15  # share of all ops, and of the (n, k), widths and lengths of each family
VARIANT_FAMILIES = ("norm", "elementwise", "loss")  # if compiled kernels may replace eager ones
OpSpace = SimpleNamespace  # what random jobs are made of, the share of each family of ops, and limits of an op


def op_space(device: str) -> OpSpace:
    """The ops of ``cuda`` or ``cpu``."""
    return OpSpace(**cases("ops")["families"], **cases("ops")[device])


def _random_job(space: OpSpace, rng: random.Random, hardware: Hardware) -> Job:
    hidden, heads, kv_heads, ffn, gates = rng.choice(space.models)
    if rng.random() < space.other_heads:
        heads = rng.choice(space.heads)
        kv_heads = rng.choice([kv for kv in (heads, heads // 2, heads // 4) if kv and heads % kv == 0])
    tp, head_dim = rng.choice(space.tps), rng.choice(space.head_dims)
    model = ModelSpec(
        family="llama" if gates == 2 else rng.choice(("gpt", "gpt", "bert")), layers=rng.choice(space.layers),
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=rng.choice(space.vocabs),
        seq_len=rng.choice(space.lengths),
    )  # fmt: skip
    micro_batch = rng.choice(space.batches)
    return Job(
        model=model,
        parallel=ParallelSpec(tp=tp, dp=1),
        batch=BatchSpec(micro_batch=micro_batch, global_batch=micro_batch, precision=space.precision),
        cluster=ClusterSpec(hardware=hardware.name, nodes=1, devices_per_node=tp),
    )


def draw(space: OpSpace, count: int, hardware: Hardware, seed: int, families: Collection[str] = ()) -> list[Op]:
    """About ``count`` distinct ops of random jobs, of some families (empty: of all), that are not too long on
    ``hardware``; fewer if a space has fewer.
    """
    rng = random.Random(seed)
    shares = {name: share for name, share in space.shares.items() if not families or name in families}
    wanted = {name: round(count * share / sum(shares.values())) for name, share in shares.items()}
    found: dict[str, dict[Op, None]] = {name: {} for name in wanted}
    for _ in range(count):
        if all(len(found[name]) >= most for name, most in wanted.items()):
            break
        try:
            ops, _ = signatures(_random_job(space, rng, hardware), hardware)
        except JobError:  # heads that tp does not divide
            continue
        for op in sorted(ops, key=str):
            if op.family == "gemm":
                op = replace(op, dtype=rng.choices(list(space.dtypes), list(space.dtypes.values()))[0])
            fits = op.num_bytes <= space.most_bytes and roofline_seconds(op, hardware) <= space.most_s
            if fits and len(found.get(op.family, ())) < wanted.get(op.family, 0):
                found[op.family][op] = None
    return [op for of in found.values() for op in of]


def likeness(op: Op) -> tuple[Hashable, ...]:
    """The properties of a held-out op that no training op has: see the module."""
    if op.family == "gemm":
        return (op.family, *op.dims[1:])
    if op.family == "attention":
        return (op.family, op.dims[5], op.dims[3])
    if op.family in ("norm", "embedding", "loss", "reduce"):
        return (op.family, op.dims[1])
    return (op.family, *op.dims)


def split(drawn: Sequence[Op], needed: Iterable[Op], unseen: Iterable[Op], seed: int) -> tuple[list[Op], list[Op]]:
    """Training ops and held-out ops."""
    teaching = dict.fromkeys(needed)
    known = {likeness(op) for op in teaching}
    judging = {likeness(op) for op in unseen} - known
    families: dict[str, dict[tuple[Hashable, ...], None]] = {}
    for op in drawn:
        if likeness(op) not in known | judging:
            families.setdefault(op.family, {})[likeness(op)] = None
    rng = random.Random(seed)
    for alike in families.values():
        judging |= set(rng.sample(list(alike), max(1, round(HELDOUT_PART * len(alike)))))
    heldout = [op for op in drawn if likeness(op) in judging]
    most = max(1, round(HELDOUT_PART * len(drawn)))
    teaching.update((op, None) for op in drawn if likeness(op) not in judging)
    return list(teaching), rng.sample(heldout, most) if len(heldout) > most else heldout
