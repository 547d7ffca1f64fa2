"""Runs of the study and measurements of ops, as plans for the harness: one for each folder of a collection.

``ops`` holds what runs alike in every variant; ``eager``, and on a GPU ``compiled``, hold runs and those ops whose
kernels may be compiled.  Each has an event file ``heldout`` that judges.  A held-out run has a hidden size, products'
(n, k), a vocabulary, a sequence and a number and size of micro-batches that no training run has.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.hardware.hardware import Hardware, find_hardware, roofline_seconds, usual_fabric
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.plan import SCHEMA, check_plan
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.experiments.studies.study import cases
from stepsight.simulator.durations.latency_model import preset_latency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import signatures
from stepsight.training.measured.measured import HELDOUT
from stepsight.training.measured.planning import make_plan, stand_in_of

STAND_IN = "stand-in"  # role of a run of one rank of a large job
CPU = "local-cpu"
ASSUMED_FABRIC = "dgx-a100"  # for emulated ranks on an unknown GPU: the delays of their collectives follow from it


@dataclass(frozen=True, slots=True)
class StepCase:
    """One run."""

    job: Job
    role: str  # train, heldout or STAND_IN
    launch_bound: bool = False  # a GPU would wait for its host most of the time
    compiled: bool = False  # it also runs with compiled kernels
    rank: int = 0  # the one that runs, of a stand-in


def step_cases(device: str, hardware: str) -> list[StepCase]:
    """Runs of a device: ``cuda`` in pure bf16 on some hardware, or ``cpu`` in fp32 (``local-cpu``), on one rank."""
    runs, found = cases("one-gpu")[device], []
    for role in ("train", "heldout"):
        for *sizes, words in runs[role]:
            job = _job(device, hardware, sizes, {"recompute": "full"} if "recompute" in words else {})
            found.append(StepCase(job, role, "launch-bound" in words, "compiled" in words and device == "cuda"))
    return found


def stand_ins(device: str, hardware: str) -> list[StepCase]:
    """Single ranks of jobs that are larger than this machine."""
    return [
        StepCase(_job(device, hardware, sizes, parallel, nodes), STAND_IN, rank=rank)
        for sizes, parallel, nodes, rank in cases("one-gpu")[device]["stand_ins"]
    ]


def _job(device: str, hardware: str, sizes: Any, parallel: dict[str, Any], nodes: int = 1) -> Job:
    family, layers, hidden, heads, kv_heads, ffn, vocab, seq_len, micro_batch, num_micro_batches = sizes
    split = ParallelSpec(**{"dp": 1, **parallel})
    model = ModelSpec(
        family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        seq_len=seq_len,
    )  # fmt: skip
    batch = BatchSpec(
        micro_batch=micro_batch,
        global_batch=micro_batch * num_micro_batches * split.dp,
        precision="pure-bf16" if device == "cuda" else "fp32",
    )
    devices = split.tp * split.pp * split.dp // nodes
    fabric = usual_fabric(hardware) if find_hardware(hardware) is not None else ASSUMED_FABRIC
    cluster = ClusterSpec(hardware=hardware, nodes=nodes, devices_per_node=devices, fabric=fabric)
    return Job(model=model, parallel=split, batch=batch, cluster=cluster)


VARIANTS = ("eager", "compiled")
OPS = "ops"  # the collection of runs that are the same in every variant
FEWEST_TRAIN, FEWEST_HELDOUT = 5, 3
PARTS = (1.0, 0.75, 0.5, 0.35)  # of the runs, until enough time is left for ops
FEWEST_COMPILED = 40  # ops that no run needs
LEAST_EVENTS = 0.3  # share of all time for ops
SEED = 0
MOST_MINUTES = 240.0


@dataclass(frozen=True)
class Study:
    """What to measure."""

    device: str  # cuda or cpu
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
    return Study(device, plans, seconds)


def facts(device: str, hardware: str) -> Hardware:
    """A preset for estimates of durations: the hardware's own, if there is one."""
    found = find_hardware(hardware) or find_hardware("h200-sxm-141gb" if device == "cuda" else "local-cpu")
    assert found is not None
    return found


def _chosen(device: str, hardware: str, variant: str, part: float) -> list[StepCase]:
    """Runs of a variant, the first of each role; emulated ranks run once, eager, at the end.

    Training and held-out runs alternate, so that a drift of the device affects both equally.
    """
    found = [case for case in step_cases(device, hardware) if variant == "eager" or case.compiled]
    places: list[tuple[float, str, StepCase]] = []
    for role, fewest in (("train", FEWEST_TRAIN), ("heldout", FEWEST_HELDOUT)):
        own = [case for case in found if case.role == role]
        own = own[: max(fewest, round(part * len(own)))]
        places += [((index + (role == "heldout") / 2) / len(own), role, case) for index, case in enumerate(own)]
    kept = [case for _, _, case in sorted(places, key=lambda place: place[:2])]
    return kept + (stand_ins(device, hardware) if variant == "eager" else [])


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
    train, heldout = (
        sorted({op for case in chosen if case.role == role for op in signatures(case.job, hardware)[0]}, key=str)
        for role in ("train", "heldout")
    )
    return train, heldout


def _plan(
    device: str, variant: str, chosen: Sequence[StepCase], ops: tuple[Sequence[Op], Sequence[Op]], seconds: float
) -> dict[str, Any]:
    """The plan of a collection; ``ops``: those that teach and those that judge."""
    plan = make_plan([(case.role, case.job, _counts(device, case)) for case in chosen])
    plan["events"] = [
        {
            "name": name,
            "world_size": 1,
            "ops": [asdict(op) for op in sorted(half, key=str)],
            "collectives": [],
            "seconds": seconds * len(half) / sum(map(len, ops)),
        }
        for name, half in zip(("train", HELDOUT), ops, strict=True)
        if half
    ]
    plan |= {"device": device, "schema": SCHEMA, **({"compile": True} if variant == "compiled" else {})}
    try:
        return check_plan(json.loads(json.dumps(plan)))
    except HarnessError as error:
        raise CollectError(f"plan {variant}: {error}") from None


HELDOUT_PART = 0.15  # share of all ops, and of the (n, k), widths and lengths of each family
VARIANT_FAMILIES = ("norm", "elementwise", "loss")  # if compiled kernels may replace eager ones
_TRIES = 200  # draws for each op: most are too long, too large or repeated


OpSpace = SimpleNamespace  # the distributions of ops: a table of ``cases.toml``


def op_space(device: str) -> OpSpace:
    """The ops of ``cuda`` or ``cpu``."""
    return OpSpace(**cases("ops")[device])


def _product(space: OpSpace, rng: random.Random) -> Op:
    hidden, heads, kv_heads, ffn, gates = rng.choice(space.models)
    tp, vocab, each = rng.choice(space.tps), rng.choice(space.vocabs), hidden // heads
    sizes = rng.choice(
        (
            ((heads + 2 * kv_heads) * each // tp, hidden),
            (hidden, hidden // tp),
            (ffn * gates // tp, hidden),
            (hidden, ffn // tp),
            (vocab // tp, hidden),
        )
    )
    kind = rng.choice(("linear", "linear", "linear_dgrad", "linear_wgrad"))
    (dtype,) = rng.choices(list(space.dtypes), list(space.dtypes.values()))
    return Op(kind, (rng.choice(space.tokens), *sizes), dtype)


def _attention(space: OpSpace, rng: random.Random) -> Op:
    heads, length, causal = rng.choice(space.heads), rng.choice(space.lengths), int(rng.random() < 0.8)
    kv_heads = rng.choice([kv for kv in {heads, heads // 2, heads // 4} if kv and heads % kv == 0])
    dims = (rng.choice(space.batches), heads, kv_heads, length, length, rng.choice(space.head_dims), causal)
    return Op(rng.choice(("attention", "attention_backward")), dims, space.dtype)


def _elementwise(space: OpSpace, rng: random.Random) -> Op:
    hidden, heads, kv_heads, ffn, gates = rng.choice(space.models)
    activation = ("swiglu", "swiglu_backward") if gates == 2 else ("gelu", "gelu_backward")
    kind, width = rng.choice(
        (
            *((kind, ffn) for kind in activation),
            *((kind, (heads + kv_heads) * (hidden // heads)) for kind in ("rope", "rope_backward")),
            *((kind, hidden) for kind in ("add", "copy", "reduce")),
        )
    )
    return Op(kind, (rng.choice(space.tokens) * width,), space.dtype)


def _rows(space: OpSpace, rng: random.Random, kinds: Sequence[str], *widths: str) -> Op:
    """An op of rows of some widths, forward or backward."""
    kind = rng.choice([each for kind in kinds for each in (kind, f"{kind}_backward")])
    sizes = [rng.choice(getattr(space, name)) for name in ("tokens", *widths)]
    return Op(kind, tuple(size[0] if isinstance(size, list) else size for size in sizes), space.dtype)


def _optimizer(space: OpSpace, rng: random.Random) -> Op:
    least, most = space.numels
    numel = int(least * (most / least) ** rng.random()) // 64 * 64
    return Op("adamw", (numel, rng.choice((8, 24, 48, 80, 120, 200))), space.dtype)


def _reduce(space: OpSpace, rng: random.Random) -> Op:
    hidden, heads, kv_heads, ffn, _ = rng.choice(space.models)
    width = rng.choice((hidden, ffn, (heads + 2 * kv_heads) * (hidden // heads)))
    return Op("bias_grad", (rng.choice(space.tokens), width), space.dtype)


# By family: how an op is drawn, and the family's share.
_FAMILIES: Mapping[str, tuple[Callable[[OpSpace, random.Random], Op], float]] = MappingProxyType(
    {
        "gemm": (_product, 0.46),
        "attention": (_attention, 0.2),
        "norm": (lambda space, rng: _rows(space, rng, ("layer_norm", "rms_norm"), "models"), 0.09),
        "elementwise": (_elementwise, 0.12),
        "loss": (lambda space, rng: _rows(space, rng, ("cross_entropy",), "vocabs"), 0.04),
        "embedding": (lambda space, rng: _rows(space, rng, ("embedding",), "models", "vocabs"), 0.04),
        "optimizer": (_optimizer, 0.03),
        "reduce": (_reduce, 0.02),
    }
)


def draw(space: OpSpace, count: int, hardware: Hardware, seed: int, families: Collection[str] = ()) -> list[Op]:
    """About ``count`` distinct ops of some families (empty: of all); fewer if a space has fewer.

    ``hardware`` says what is too long.
    """
    rng, found = random.Random(seed), dict[Op, None]()
    chosen = {name: of for name, of in _FAMILIES.items() if not families or name in families}
    whole = sum(part for _, part in chosen.values())
    for make, part in chosen.values():
        wanted, tries = len(found) + round(count * part / whole), 0
        while len(found) < wanted and tries < _TRIES * count:
            op = make(space, rng)
            tries += 1
            if op.num_bytes <= space.most_bytes and roofline_seconds(op, hardware) <= space.most_s:
                found[op] = None
    return list(found)


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
