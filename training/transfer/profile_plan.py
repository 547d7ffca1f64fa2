"""Choose the ops and collectives to measure first on a new device, as a plan for the harness.

Candidates are the distinct ops of training the catalogue's models, sharded in several ways.  Of each family those are
chosen that lower the expected error over all its candidates most, given what other devices' predictors know
(``posterior.choose_rows``); products get half of the time, attention a quarter, everything else the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from stepsight.dataset.errors import CollectError, StepsightError
from stepsight.dataset.hardware import Hardware
from stepsight.dataset.harness.plan import SCHEMA, check_plan
from stepsight.dataset.job import Job
from stepsight.dataset.models import MODELS
from stepsight.dataset.op import Op
from stepsight.dataset.physics import roofline_seconds
from stepsight.simulator.lowering.lower import signatures
from stepsight.training.kernels.kernel_models import label
from stepsight.training.transfer.posterior import choose_rows
from stepsight.training.transfer.transferred import Teacher, Transfer

LAUNCH_S, OP_S, COLLECTIVE_S = 20.0, 0.25, 0.5  # start-up of the harness, and of each signature with its inputs
LONGEST_S, MOST_MEMORY = 0.5, 0.2  # limits of a candidate: time by the roofline, share of the memory for its operands
CANDIDATES = 400  # most candidates of a family
SHARES = {"gemm": 0.5, "attention": 0.25}  # shares of the ops' time; other families share the rest
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = tuple(2**power for power in range(12, 31, 2))
LINKS_SHARE = 0.2  # share of the time, if there are several devices
MOST_MINUTES = 240.0


def profile_plan(
    hardware: Hardware, teachers: Sequence[Teacher], minutes: float, *, devices: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Make a plan for the harness that takes about a given number of minutes.

    Args:
        hardware: The device's facts.
        teachers: Devices that were measured.
        minutes: Of measuring.
        devices: Devices of the node; from 2 on collectives are measured too.
        seed: Of the choice of candidates.

    Raises:
        CollectError: If there is too little time to measure anything.
    """
    seconds = 60 * minutes - LAUNCH_S
    if not 0 < minutes <= MOST_MINUTES or seconds < 10 * OP_S:
        raise CollectError(f"minutes must be from 0.5 to {MOST_MINUTES:g}, got {minutes:g}")
    links = _links(devices, seconds * LINKS_SHARE) if devices > 1 else []
    count = int((seconds - COLLECTIVE_S * len(links)) / OP_S)
    transfer = Transfer(hardware, tuple(teachers))
    ops = _ordered(transfer, _candidates(hardware), count, seed)
    event = {
        "name": "profile",
        "world_size": 1,
        "ops": [{**asdict(op), "dims": list(op.dims)} for op in ops],
        "collectives": [],
        "seconds": OP_S * len(ops),
    }
    events = [event]
    if links:
        of_links = {"name": "links", "world_size": devices, "ops": [], "collectives": links}
        events.append({**of_links, "seconds": COLLECTIVE_S * len(links)})
    return check_plan({"schema": SCHEMA, "runs": [], "events": events, "device": "auto"})


def _ordered(transfer: Transfer, candidates: Sequence[Op], count: int, seed: int) -> list[Op]:
    """The ops to measure, families interleaved by their shares, the most informative of each first."""
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, str], list[Op]] = {}
    for op in candidates:
        groups.setdefault((label(op.family, op, transfer.hardware), op.dtype), []).append(op)
    others = sum(family.split("/")[0] not in SHARES for family, _ in groups)
    alike = {share: sum(family.split("/")[0] == share for family, _ in groups) for share in SHARES}
    queue: list[tuple[float, str, Op]] = []
    for (family, dtype), ops in groups.items():
        kind = family.split("/")[0]
        share = SHARES[kind] / alike[kind] if kind in SHARES else (1 - sum(SHARES.values())) / max(others, 1)
        some = [ops[index] for index in rng.permutation(len(ops))[:CANDIDATES].tolist()]
        chosen = choose_rows(transfer.rows_of(some)[1], math.ceil(count * share) + 1)
        queue += [((turn + 1) / share, f"{family}{dtype}", some[index]) for turn, index in enumerate(chosen)]
    return [op for _, _, op in sorted(queue, key=lambda item: item[:2])[:count]]


def _candidates(hardware: Hardware) -> list[Op]:
    """Distinct training ops of the catalogue's models on this hardware that are not too long or large to measure."""
    found: dict[Op, None] = {}
    for job in _jobs(hardware):
        try:
            ops, _ = signatures(job, hardware)
        except StepsightError:  # the hardware states no peak for the model's precision
            continue
        found.update(dict.fromkeys(sorted(ops, key=str)))
    return [op for op in found if _measurable(op, hardware)]


def _measurable(op: Op, hardware: Hardware) -> bool:
    if op.record.bound == "compute" and op.dtype not in hardware.peak_flops:
        return False
    if op.record.bound not in ("compute", "memory") or op.num_bytes > MOST_MEMORY * hardware.memory_bytes:
        return False
    return roofline_seconds(op, hardware) <= LONGEST_S


def _jobs(hardware: Hardware) -> Iterator[Job]:
    wanted: list[str] = [name for name in ("bf16", "fp8", "fp16") if name in hardware.peak_flops]
    precisions = wanted[:2] or ["fp32"]
    for model in MODELS:
        for tp, micro_batch in ((1, 1), (1, 4), (2, 2), (4, 1), (8, 2)):
            for precision in precisions:
                try:
                    yield Job.of(
                        {
                            "model": {"name": model},
                            "parallel": {"tp": tp, "sequence_parallel": tp > 1},
                            "batch": {"micro_batch": micro_batch, "global_batch": micro_batch, "precision": precision},
                            "cluster": {
                                "hardware": "a100-sxm-80gb" if hardware.kind == "gpu" else "local-cpu",
                                "nodes": 1,
                                "devices_per_node": tp,
                            },
                        }
                    )
                except StepsightError:  # heads that tp does not divide
                    continue


def _links(devices: int, seconds: float) -> list[dict[str, Any]]:
    """Collectives within a node with all sizes, those over all devices first."""
    groups = [2**power for power in range(int(math.log2(devices)), 0, -1)]
    rows = [
        {"kind": kind, "num_bytes": size, "group_size": group, "ranks_per_node": group}
        for group in dict.fromkeys([devices, *groups])
        for size in SIZES
        for kind in COLLECTIVES
        if kind != "send_recv" or group == 2
    ]
    return rows[: max(int(seconds / COLLECTIVE_S), 1)]
