"""Choose the ops and collectives to measure first on a new device, as a plan for the harness.

Candidates are the distinct ops of training the catalogue's models, sharded in several ways, and those of the jobs that
are asked about.  Those are chosen that lower the expected error most, given what other devices' predictors know
(``posterior.choose_rows``); an error counts for more where the jobs spend more of their time (``wanted_ops``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CollectError, StepsightError
from stepsight.dataset.hardware.hardware import Hardware, roofline_seconds
from stepsight.dataset.harness.plan.plan_checks import SCHEMA, check_plan
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import MODELS
from stepsight.dataset.kinds.op import Op
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import simulate
from stepsight.simulator.programs.lower import signatures
from stepsight.training.fitting.train_tables import FEWEST
from stepsight.training.kernels.kernel_models import label
from stepsight.training.kernels.transferred import Teacher, Transfer, choose_rows

LAUNCH_S, OP_S, COLLECTIVE_S = 20.0, 0.25, 0.5  # start-up of the harness, and of each signature with its inputs
LONGEST_S, MOST_MEMORY = 0.5, 0.2  # limits of a candidate: time by the roofline, share of the memory for its operands
CANDIDATES = 400  # most candidates of a family, those with most of the time; as many others are drawn
SHARDINGS = ((1, 1), (1, 4), (2, 2), (4, 1), (8, 2))  # tensor parallelism and size of a micro-batch
MICRO_BATCHES = 16  # of the catalogue's jobs: the optimizer takes a small part of their time
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = tuple(2**power for power in range(12, 31, 2))
LINKS_SHARE = 0.2  # share of the time, if there are several devices
MOST_MINUTES, MOST_DEVICES = 240.0, 1024


def profile_plan(
    hardware: Hardware,
    teachers: Sequence[Teacher],
    minutes: float,
    *,
    jobs: Sequence[Job] = (),
    devices: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """A plan for the harness that measures for about so many minutes what lowers the error of the jobs most (none: of
    the catalogue's models); with several devices of a node, collectives too. ``teachers``: devices that were measured.
    Raises ``CollectError`` if there is too little time.
    """
    seconds = 60 * minutes - LAUNCH_S
    if not 0 < minutes <= MOST_MINUTES or seconds < 10 * OP_S:
        raise CollectError(f"minutes must be from 0.5 to {MOST_MINUTES:g}, got {minutes:g}")
    if not 1 <= devices <= MOST_DEVICES:
        raise CollectError(f"devices of a node must be from 1 to {MOST_DEVICES}, got {devices!r:.40}")
    links: list[dict[str, Any]] = []
    if devices > 1:  # collectives within a node with all sizes, those over all devices first
        groups = dict.fromkeys([devices, *(2**power for power in range(int(math.log2(devices)), 0, -1))])
        links = [
            {"kind": kind, "num_bytes": size, "group_size": group, "ranks_per_node": group}
            for group, size, kind in product(groups, SIZES, COLLECTIVES)
            if kind != "send_recv" or group == 2
        ][: max(int(seconds * LINKS_SHARE / COLLECTIVE_S), 1)]
    count = int((seconds - COLLECTIVE_S * len(links)) / OP_S)
    transfer = Transfer(hardware, tuple(teachers))
    shares = wanted_shares(hardware, jobs)
    ops = _ordered(transfer, shares, count, seed)
    rows = [{**asdict(op), "dims": list(op.dims)} for op in ops]
    told: list[tuple[Any, ...]] = [("profile", 1, rows, [], OP_S * len(ops))]
    told += [("links", devices, [], links, COLLECTIVE_S * len(links))] if links else []
    events = [dict(zip(("name", "world_size", "ops", "collectives", "seconds"), each, strict=True)) for each in told]
    return check_plan({"schema": SCHEMA, "runs": [], "events": events, "device": "auto"})


def _ordered(transfer: Transfer, shares: Mapping[Op, float], count: int, seed: int) -> list[Op]:
    """The ops to measure, those first that lower the error of the jobs' time most."""
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, str], list[Op]] = {}
    for op in shares:
        groups.setdefault((label(op.family, op, transfer.hardware), op.dtype), []).append(op)
    queue: list[tuple[float, str, int, Op]] = []
    for (family, dtype), ops in groups.items():
        weights = np.array([shares[op] for op in ops])
        order = np.lexsort((rng.permutation(len(ops)), -weights)).tolist()
        targets = [ops[place] for place in order[:CANDIDATES]]
        some = [op for op in targets if _measurable(op, transfer.hardware)]
        rest = [op for op in (ops[place] for place in order[CANDIDATES:]) if _measurable(op, transfer.hardware)]
        some += rest[:CANDIDATES]
        if not some:
            continue
        _, rows = transfer.rows_of([*targets, *some])
        split = len(targets)
        chosen, gains = choose_rows(
            {name: block[split:] for name, block in rows.items()}, min(count, len(some)),
            targets={name: block[:split] for name, block in rows.items()}, weights=np.sort(weights)[::-1][:split],
        )  # fmt: skip
        gains[:FEWEST] = gains[:FEWEST].mean()  # fewer rows of a family teach nothing
        queue += [(-gain, f"{family}{dtype}", turn, some[place])
                  for turn, (place, gain) in enumerate(zip(chosen, gains.tolist(), strict=True))]  # fmt: skip
    return [op for *_, op in sorted(queue, key=lambda item: item[:3])[:count]]


def wanted_shares(hardware: Hardware, jobs: Sequence[Job]) -> dict[Op, float]:
    """Candidates, and the share of the jobs' time that each takes; the catalogue's ops are candidates in any case."""
    catalogue: list[Job] = []
    found: dict[Op, float] = {}
    for job in catalogue_jobs(hardware):
        try:
            ops, _ = signatures(job, hardware)
        except StepsightError:  # the hardware states no peak for the model's precision
            continue
        catalogue.append(job)
        found.update(dict.fromkeys(sorted(ops, key=str), 0.0))
    shares: dict[Op, float] = {}  # of the time on the critical path by the roofline; jobs count alike, the sum is 1
    asked = jobs or catalogue
    for job in asked:
        latency = RooflineLatency(hardware, job.fabric)
        simulation = simulate(job, latency)
        counts: dict[Op, float] = {}
        for segment, _, uses in simulation.segment_uses():
            for node in simulation.lowered.segments[segment].program.nodes:
                if isinstance(node.work, Op):
                    counts[node.work] = counts.get(node.work, 0.0) + node.share * float(uses.sum())
        each = zip(counts.items(), latency.op_seconds(list(counts)).tolist(), strict=True)
        own = {op: count * seconds for (op, count), seconds in each if count > 0}
        total = sum(own.values())
        for op, seconds in own.items():
            shares[op] = shares.get(op, 0.0) + seconds / total / len(asked)
    return {op: share for op, share in {**found, **shares}.items() if op.record.bound in ("compute", "memory")}


def _measurable(op: Op, hardware: Hardware) -> bool:
    known = op.record.bound != "compute" or op.dtype in hardware.peak_flops
    return known and op.num_bytes <= MOST_MEMORY * hardware.memory_bytes and roofline_seconds(op, hardware) <= LONGEST_S


def catalogue_jobs(hardware: Hardware, models: Sequence[str] = tuple(MODELS)) -> Iterator[Job]:
    """Training of models of the catalogue, sharded in several ways."""
    precisions: Sequence[str] = [name for name in ("bf16", "fp8", "fp16") if name in hardware.peak_flops][:2]
    own = "a100-sxm-80gb" if hardware.kind == "gpu" else "local-cpu"
    for model, (tp, size), precision in product(models, SHARDINGS, precisions or ["fp32"]):
        batch = {"micro_batch": size, "global_batch": MICRO_BATCHES * size, "precision": precision}
        cluster = {"hardware": own, "nodes": 1, "devices_per_node": tp}
        parallel = {"tp": tp, "sequence_parallel": tp > 1}
        with suppress(StepsightError):  # heads that tp does not divide
            yield Job.of({"model": {"name": model}, "parallel": parallel, "batch": batch, "cluster": cluster})
