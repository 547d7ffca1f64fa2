"""Recommendation models: predicted and measured lookups, steps and exchanges on this machine, placements against
torchrec's planner, and the host's overheads in traces.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepsight.dataset.base.bounded import read_unpacked
from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import new_folder, write_text
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.harness.measuring.timing import Clock
from stepsight.dataset.harness.ops.callables import op_call
from stepsight.dataset.harness.ops.input_pool import Pool
from stepsight.dataset.harness.scripts.launch import Ranks
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import COLUMN, REPLICATED, TABLE, Floats, equal_exchange, placements_of
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import Box, read_box
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.search.sharding import (
    FULL,
    GREEDY,
    PlacementCosts,
    baseline_places,
    has_torchrec,
    placed,
    planner_places,
    search_places,
)
from stepsight.experiments.studies.study import Study, cases
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.experiments.tasks.scripts import run_script
from stepsight.training.collectives.collective_models import fit_collectives
from stepsight.training.fitting.train_runs import train
from stepsight.training.fitting.train_tables import TimedJob, fit_calibration
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.measured.planning import SleepingLatency, box_plan, make_plan
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

_FORWARD, _BACKWARD = "table_lookup", "table_lookup_backward"
_WARM = 2  # rounds that are not counted
SCRIPT, PIPELINE = (Path(f"examples/scripts/train_{name}.py") for name in ("dlrm", "torchrec"))
EXCHANGES = cases("exchanges")
_RUNNABLE = (TABLE, COLUMN, REPLICATED)  # kinds that scripts have
_TAUGHT = 12  # models whose ops and collectives teach
_ALONE: dict[str, str] = cases("alone")


def drawn_ops(count: int, seed: int) -> list[Op]:
    """Lookups of random sizes and localities, forward and backward."""
    draw, ops = random.Random(seed), list[Op]()
    for _ in range(count):
        sizes = (1, 2, 4, 8, 16), (16, 32, 64, 128), (256, 512, 1024, 2048)
        tables, hidden, samples = map(draw.choice, sizes)
        pooling, bags = math.exp(draw.uniform(0.0, math.log(40.0))), samples * tables
        indices = max(bags, int(bags * pooling))
        distinct = max(tables, int(indices * math.exp(draw.uniform(math.log(0.02), 0.0))))
        dims = indices, hidden, bags, distinct, tables
        ops += [Op(_FORWARD, dims, "fp32"), Op(_BACKWARD, (*dims, 1), "fp32")]
    return ops


def run_lookups(options: argparse.Namespace) -> tuple[Any, str]:
    """Errors of lookups that taught nothing."""
    ops = drawn_ops(options.ops, options.seed)
    before, hardware, device = os.getloadavg()[0], HARDWARE["local-cpu"], torch.device("cpu")
    torch.set_num_threads(1)
    pool, clock = Pool(device, "fp32"), Clock(device)
    calls = (op_call(op.kind, list(op.dims), pool) for op in ops)  # the shortest: other load comes and goes
    seconds = np.array([min(clock.samples(call, _WARM + options.rounds, 0.0).device[_WARM:]) for call in calls])
    judged = np.arange(len(ops)) // 2 % 3 == 0  # forward and backward of a signature together
    model = fit_kernels([op for op, own in zip(ops, judged, strict=True) if not own], 1, seconds[~judged], hardware)
    told: dict[str, Any] = {"load": [before, os.getloadavg()[0]], "trained_on": int((~judged).sum())}
    for kind in (_FORWARD, _BACKWARD):
        mine = [at for at in np.flatnonzero(judged).tolist() if ops[at].kind == kind]
        told[kind] = _errors(model.seconds([ops[at] for at in mine], 1), seconds[mine])
    return told, _error_text(told)


def _errors(predicted: Any, measured: Any) -> dict[str, float]:
    """Relative errors: how many, their geometric mean, mean and 90th percentile."""
    error = np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)
    geometric = float(np.exp(np.log(np.maximum(error, 1e-4)).mean()))
    mean, p90 = float(error.mean()), float(np.quantile(error, 0.9))
    return {"judged": len(error), "geometric_mean": geometric, "mean": mean, "p90": p90}


def _error_text(told: dict[str, Any]) -> str:
    rows = [{"what": key, **value} for key, value in told.items() if isinstance(value, dict)]
    columns = {"": "what", "judged": "judged", "geometric mean": "geometric_mean", "mean": "mean", "p90": "p90"}
    return f"{table_of(rows, columns, 4)}\nload of the machine: %.1f before, %.1f after" % tuple(told["load"])


def two_rank_jobs(seed: int, *, pipelined: bool = False, box: Box | None = None) -> list[Job]:
    """A random model: with whole tables, tables split by columns, and a third replicated, which no box sleeps for."""
    job = drawn_job(seed, "recommendation")
    if box is not None:
        whole = {**asdict(job.batch), "global_batch": job.batch.micro_batch * box.num_ranks}
        cluster = {"nodes": box.nodes, "devices_per_node": box.ranks_per_node, "fabric": box.fabric}
        job = Job.from_dict(
            {**job.to_dict(), "parallel": {}, "batch": whole, "cluster": {"hardware": "local-cpu", **cluster}}
        )
    job = replace(job, sharding=replace(job.sharding, pipelined=pipelined or box is not None))
    columns, tables = replace(job, sharding=replace(job.sharding, rule="column-wise")), job.model.tables
    small = sorted(range(len(tables)), key=lambda at: tables[at].rows)[: len(tables) // 3]
    places = enumerate(placements_of(tables, job.sharding, job.table_ranks))
    mixed = [replace(place, kind=REPLICATED, ranks=()) if at in small else place for at, place in places]
    return [job, columns, placed(job, mixed)] if box is None else [job, columns]


def _steps(arguments: Sequence[str], name: str, steps: int, options: argparse.Namespace, script: Path = SCRIPT) -> Any:
    """Seconds from one step's last end on any rank to the next one's, on two ranks or in a box, ``(rounds, steps)``: a
    rank that ends early waits in the next step, which may be another job's.
    """
    counts = {"warmup": 2 * steps, "rounds": options.rounds, "steps": steps, "profile_steps": 0}
    with new_folder(options.out / name) as part:
        settings = {"arguments": list(arguments), "timeout_s": 600.0, **counts}
        ranks = Ranks.here(2) if options.box is None else Ranks.in_box(options.box.to_dict())
        found = run_script(script, settings, part, part / "script.log", ranks, "")
    ends = np.array([rank["rounds"] for rank in found]).cumsum(axis=2).max(axis=0)
    return np.diff(ends, axis=1, prepend=0.0)


def run_steps(options: argparse.Namespace) -> tuple[Any, str]:
    """Errors of steps and exchanges, from ops and collectives of other models alone, and calibrated on their steps."""
    box, told = options.box, dict[str, Any](load=[os.getloadavg()[0]])
    predictor, script = _taught(options), PIPELINE if options.torchrec or box else SCRIPT
    timed = [
        (seed, *case)
        for seed in range(_TAUGHT if box else 0, _TAUGHT + options.models)
        for case in _measured(seed, two_rank_jobs(seed, pipelined=options.torchrec, box=box), options, script)
    ]
    own, cases = ([case for seed, *case in timed if (seed < _TAUGHT) is before] for before in (True, False))
    seconds = [float(np.median(each)) for _, each in cases]
    runs, teachers = [TimedJob(job, float(np.median(each))) for job, each in own], {"alone": predictor}
    teachers |= {"calibrated": fit_calibration(predictor, runs).predictor} if runs else {}
    for name, each in teachers.items():
        told[f"steps, {name}"] = _errors([predict(job, each).iteration_time_s for job, _ in cases], seconds)
    told |= _exchanges(cases[0][0], options)
    told["load"].append(os.getloadavg()[0])
    return told, _error_text(told)


def _exchanges(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Errors of unequal exchanges from equal ones of other sizes of the same processes, and of those of other ones."""
    ranks, more = job.table_ranks, argparse.Namespace(**{**vars(options), "rounds": 3 * options.rounds})
    unequal = ([*[size] * (ranks.num - 1), size * ratio] for size, ratio in EXCHANGES["unequal"])
    splits = [*([size] * ranks.num for size in EXCHANGES["equal"]), *unequal]
    parts, taught = [str(part) for each in splits for part in each], len(EXCHANGES["equal"])
    first, again = [np.median(_steps(parts, f"exchanges-{turn}", len(splits), more), axis=0) for turn in (1, 2)]
    equal = (equal_exchange(1.0 * ranks.num * np.array(e), np.full(ranks.num, 1.0 * sum(e)), ranks) for e in splits)
    sizes = [Collective("all_to_all", int(4 * size), ranks.num, ranks.per_node) for size in equal]
    model = fit_collectives(sizes[:taught], [job.fabric] * taught, again[:taught])
    predicted, measured = model.seconds(sizes[taught:], job.fabric), again[taught:]
    return {"unequal exchanges": _errors(predicted, measured), "measured again": _errors(first[taught:], measured)}


def _taught(options: argparse.Namespace) -> Predictor:
    """A predictor that saw ops and collectives of other models alone; for a box, collectives in boxes of 2 and 4."""
    if not SCRIPT.is_file():
        raise CollectError(f"the study runs {SCRIPT}: begin it in the root of a checkout, got {Path.cwd()}")
    os.environ |= _ALONE
    jobs, out = [job for seed in range(_TAUGHT) for job in two_rank_jobs(seed)], options.out
    run_plan(make_plan([], profile_jobs=jobs, event_seconds=options.event_seconds), out / "events")
    predictor = train([out / "events"], out / "predictor", progress=False)
    for ranks in (2, 4) if options.box else ():
        box, kinds = read_box(f"{ranks}x1@{max(options.box.mbits_per_s):g}mbit"), ("all_to_all", "all_reduce")
        sizes = [Collective(kind, 4**power, ranks, 1) for kind in kinds for power in range(4, 13)]
        asleep, ops = SleepingLatency(HARDWARE["box"], box.links), [Op("copy", (2**16,), "fp32")]
        plan = box_plan(box, [], asleep, collectives=sizes, ops=ops, event_seconds=options.event_seconds)
        run_plan(plan, out / f"links-{ranks}")
    if not options.box:
        return predictor
    folders = [out / "links-2", out / "links-4"]
    return replace(predictor, collective=train(folders, out / "links", progress=False).collective)


def _measured(seed: int, jobs: Sequence[Job], options: argparse.Namespace, script: Path = SCRIPT) -> list[Any]:
    """Jobs of one model, and seconds of their steps on two ranks or in a box, in turn."""
    paths = [options.out / f"{seed}-{at}.toml" for at in range(len(jobs))]
    for path, job in zip(paths, jobs, strict=True):
        write_text(path, job_toml(job))
    arguments = [*(["--sleep"] if options.box else []), *map(str, paths)]
    return list(zip(jobs, _steps(arguments, f"steps-{seed}", len(jobs), options, script).T, strict=True))


def drawn_job(seed: int, study: str) -> Job:
    """A random model with the statistics of the public data sets of FBGEMM: most tables small, few hot ones."""
    draw, sizes = random.Random(seed), cases(study)
    mean, deviation, most = sizes["rows"]
    tables = [
        {
            "rows": int(min(10 ** draw.gauss(mean, deviation), most)) + 64,
            "dim": draw.choice((32, 64, 128)),
            "pooling": float(min(max(1, round(draw.lognormvariate(1.2, 1.2))), 60)),
            "zipf": draw.uniform(0.6, 1.2),
        }
        for _ in range(draw.randint(*sizes["tables"]))
    ]
    devices, samples = draw.choice(sizes["devices"]), draw.choice(sizes["samples"])
    job, per_node = sizes["job"], min(devices, 8)
    job["model"]["tables"] = tables
    job["batch"] |= {"micro_batch": samples, "global_batch": samples * devices}
    job["cluster"] |= {"nodes": devices // per_node, "devices_per_node": per_node}
    return Job.from_dict(job)


class _RunnableCosts(PlacementCosts):
    """Costs of placements that the script can run: tables by rows are never the best."""

    def amounts(self, table: TableSpec, kind: str, shards: int, location: str, *_: Any) -> Floats:
        return super().amounts(table, kind, shards, location) * (1.0 if kind in _RUNNABLE else 1e9)


def _placed_jobs(job: Job, predictor: Predictor, trials: int) -> dict[str, Job]:
    """A job with its tables placed by the search, by simple rules and by torchrec's planner, as the script can."""
    found, _ = search_places(_RunnableCosts(job, predict(job, predictor).latency), trials)
    jobs = {name: placed(job, baseline_places(job, name)) for name in GREEDY}
    jobs |= {"torchrec": placed(job, planner_places(job, _RUNNABLE))} if has_torchrec() else {}
    tried = [placed(job, places) for places in found[:FULL] if {place.kind for place in places} <= {*_RUNNABLE}]
    return {"search": min([*tried, *jobs.values()], key=lambda one: predict(one, predictor).iteration_time_s), **jobs}


def run_placements(options: argparse.Namespace) -> tuple[Any, str]:
    """Medians of steps on two ranks with the placements of each method, as multiples of the best one's."""
    found, options = defaultdict[str, list[float]](list), argparse.Namespace(**vars(options), box=None)
    predictor = _taught(options)
    for seed in range(options.seed, options.seed + options.tasks):
        jobs = _placed_jobs(drawn_job(seed, "sharding"), predictor, options.trials)
        measured = [float(np.median(rounds)) for _, rounds in _measured(seed, [*jobs.values()], options)]
        for name, seconds in zip(jobs, measured, strict=True):
            found[name].append(seconds / min(measured))
    told = {name: {"tasks": len(each), "regret": float(np.mean(each)) - 1.0} for name, each in found.items()}
    for name, ratios in found.items():
        told[name]["within_5_percent"] = sum(ratio <= 1.05 for ratio in ratios)
    columns = {"placement": "name", "tasks": "tasks", "regret": "regret", "within 5 %": "within_5_percent"}
    return told, table_of([{"name": name, **each} for name, each in told.items()], columns, 4)


# Seconds by overhead and operator.  T1 lies between operators, T2 before an operator's first launch, T3 behind its last
# one, T4 is a launch, T5 lies between launches (Lin et al., HiPC 2022); "launch" between launching operators.
Found = dict[tuple[str, str], list[float]]
_PARTS, _OURS, _STALL_S = ("T1", "T2", "T3", "T4", "T5"), "launch", 1e-3  # a longer overhead is a wait


def overheads_of(events: Iterable[dict[str, Any]]) -> Found:
    """Overheads of the outermost operators of a Kineto trace."""
    found, threads = defaultdict[tuple[str, str], list[float]](list), defaultdict[Any, list[Any]](list)
    for event in events:
        launch = "LaunchKernel" in event.get("name", "")
        if launch or event.get("cat") in ("cpu_op", "Operator"):
            begin = 1e-6 * float(event["ts"])
            threads[event.get("tid")].append((begin, begin + 1e-6 * event.get("dur", 0.0), launch, event["name"]))
    for calls in threads.values():
        operators, before, since = list[tuple[Any, list[Any]]](), None, 0.0
        for call in sorted(calls, key=lambda one: (one[0], -one[1])):
            if operators and call[0] < operators[-1][0][1]:
                operators[-1][1].extend([call] if call[2] else [])
            elif not call[2]:
                operators.append((call, []))
        for (begin, end, _, name), own in operators:
            parts = [("T1", "", begin - before)] if before is not None else []
            parts += [("T2", name, (own[0][0] if own else end) - begin), *[("T4", "", one[1] - one[0]) for one in own]]
            parts += [("T5", name, late[0] - early[1]) for early, late in pairwise(own)]
            parts += [("T3", name, end - own[-1][1])] if own else []
            parts, before = [part for part in parts if 0.0 <= part[2] <= _STALL_S], end
            since += sum(seconds for *_, seconds in parts)
            if own:
                parts, since = [*parts, *[(_OURS, name, since / len(own))] * len(own)], 0.0
            for part, of, seconds in parts:
                found[part, of].append(seconds)
    return found


def run_overheads(options: argparse.Namespace) -> tuple[Any, str]:
    """Errors of each workload's host time, each overhead the mean of the other workloads: of the operator, if known."""
    traces = {path.name.split(".")[0]: json.loads(read_unpacked(path)) for path in options.traces}
    rows, found = list[dict[str, Any]](), {name: overheads_of(trace["traceEvents"]) for name, trace in traces.items()}
    for workload, own in found.items():
        known, told, row = defaultdict[Any, list[float]](list), defaultdict[str, float](float), {"workload": workload}
        for (part, name), seconds in (item for key in found if key != workload for item in found[key].items()):
            known[part, name] += seconds
            known[part] += seconds
        for (part, name), seconds in own.items():
            told[part] += len(seconds) * float(np.mean(known[part, name] or known[part] or [0.0]))
        mine = {part: [s for (kind, _), each in own.items() if kind == part for s in each] for part in _PARTS}
        row |= {part: float(np.mean(seconds or [0.0])) for part, seconds in mine.items()}
        row["host_s"] = host = sum(map(sum, mine.values()))
        rows.append({**row, "five": sum(told[part] for part in _PARTS) / host - 1.0, "one": told[_OURS] / host - 1.0})
    times = {f"{part} us": lambda row, part=part: 1e6 * row[part] for part in _PARTS}
    return rows, table_of(
        rows, {"": "workload", "host ms": "host_s", **times, "error, T1-T5": "five", "error, launch": "one"}, 3
    )


LOOKUPS = Study(
    "lookups",
    "predicted and measured lookups in embedding tables on one core of this machine; with FBGEMM where it is installed",
    run_lookups,
    {
        "--ops": {"type": int, "default": 90, "help": "signatures, a third of which judges"},
        "--rounds": {"type": int, "default": 15, "help": "calls of each"},
        "--seed": {"type": int, "default": 0},
    },
)
STEPS = Study(
    "recommendation",
    "predicted and measured steps of recommendation models, and unequal exchanges, on two ranks; needs FBGEMM",
    run_steps,
    {
        "--models": {"type": int, "default": 6, "help": "models, each with three shardings"},
        "--rounds": {"type": int, "default": 30, "help": "steps of each"},
        "--event-seconds": {"type": float, "default": 200.0, "help": "for ops and collectives"},
        "--out": {"type": Path, "required": True, "help": "new folder of what is measured"},
        "--torchrec": {"action": "store_true", "help": "steps of torchrec's own pipeline"},
        "--box": {"type": read_box, "help": "the same asleep in a box, as 4x1@400mbit; needs root and iproute2"},
    },
)
PLACEMENTS = Study(
    "placements",
    "steps on two ranks with tables placed by the search, by simple rules and by torchrec's planner; needs FBGEMM",
    run_placements,
    {
        "--tasks": {"type": int, "default": 20},
        "--seed": LOOKUPS.options["--seed"],
        "--trials": {"type": int, "default": 20000, "help": "placements that the search judges"},
        **{flag: STEPS.options[flag] for flag in ("--rounds", "--event-seconds", "--out")},
    },
)
OVERHEADS = Study(
    "host-overheads",
    "the host's time of traced steps from overheads of other workloads: T1 to T5 of each operator, and one of a launch",
    run_overheads,
    {"traces": {"type": Path, "nargs": "+", "help": "Kineto traces of different workloads on GPUs"}},
)
