"""Train on real runs of at most 4 ranks, predict held-out runs of 8 and 16, run them, and compare. All run in boxes, in
which sleeping replaces computation: real processes, schedules and messages on limited links (needs root and iproute2).
The study takes about two hours on an otherwise idle machine; a study that was stopped goes on.

Compared are iterations, the activity of every rank, and begin and end of every pass of a micro-batch.  Three baselines
predict the same runs: a roofline with latency and bandwidth of the links, ideal arithmetic, and a closed formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, digest, read_json, write_json, write_text
from stepsight.dataset.hardware.hardware import HARDWARE as PRESETS
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import HARDWARE, Box, read_box, read_manifest
from stepsight.experiments.evaluation.baselines import closed_form
from stepsight.experiments.evaluation.error_metrics import regret
from stepsight.experiments.reports.plots import plot_predicted_against_measured
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.studies.study import Options, Row, Study, cases, figures_text
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.simulator.durations.latency_model import Seconds
from stepsight.simulator.iteration.simulate import Simulation, simulate
from stepsight.simulator.schedules import KIND_NAMES
from stepsight.training.fitting.train_runs import spearman, train
from stepsight.training.measured.planning import SleepingLatency, box_plan
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

Array = NDArray[np.float64]
LABELS = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}  # of the harness's spans
COMMUNICATION_BOUND = 0.4  # share of the predicted iteration in which ranks wait for communication
_NOTHING_S = 1e-9


MOST_TRAINING_RANKS = 4
RATE = 100  # Mbit/s
SIZES = (4, 8, 16)
PROFILE, JUDGE = "profile", "judge"
ROUNDS = {"judge": 3, "train": 2}
COUNTS = {"steps": 1, "warmup": 1, "profile_steps": 0}
EVENT_SECONDS = 30.0
MODELS = {name: ModelSpec(**sizes) for name, sizes in cases("box")["models"].items()}


@dataclass(frozen=True)
class BoxCase:
    """One run."""

    name: str  # box/<model>/<strategy>
    box: Box
    job: Job

    @property
    def judges(self) -> bool:
        """Whether it is larger than the training runs."""
        return self.job.cluster.num_devices > MOST_TRAINING_RANKS

    @property
    def file_name(self) -> str:
        return self.name.removeprefix("box/").replace("/", ".").replace("@", "-")

    def folder(self, out: Path) -> Path:
        return out / (JUDGE if self.judges else PROFILE) / self.box.name.replace("@", "-")


def strategy_name(parallel: ParallelSpec) -> str:
    """``2M2P4D``, and a schedule that is not 1F1B."""
    words = [f"{parallel.tp}M{parallel.pp}P{parallel.dp}D"]
    if parallel.pp > 1 and parallel.schedule != "1f1b":
        words.append(parallel.schedule)
    if parallel.virtual_stages > 1:
        words.append(f"v{parallel.virtual_stages}")
    if parallel.zero_stage:
        words.append("fsdp")
    if parallel.dp > 1 and not parallel.zero_stage and parallel.bucket_mbytes != ParallelSpec().bucket_mbytes:
        words.append(f"b{parallel.bucket_mbytes:g}")
    return "-".join(words)


def case(model: str, spec: ModelSpec, box: Box, parallel: ParallelSpec, batches: int = 0, suffix: str = "") -> BoxCase:
    """A strategy of a model on a box; ``batches``: micro-batches of each replica, 0: as fill the pipeline."""
    parallel = replace(parallel, dp=box.num_ranks // (parallel.tp * parallel.pp))
    usual = box.ranks_per_node == 1 and set(box.mbits_per_s) == {RATE}
    words = [strategy_name(parallel), f"m{batches}" if batches else "", "" if usual else box.name, suffix]
    batches = batches or min(16, max(4, 2 * parallel.pp))
    job = Job(
        model=spec,
        parallel=parallel,
        batch=BatchSpec(micro_batch=1, global_batch=batches * parallel.dp, precision="fp32"),
        cluster=ClusterSpec(hardware=HARDWARE, nodes=box.nodes, devices_per_node=box.ranks_per_node, fabric=box.fabric),
    )
    return BoxCase(f"box/{model}/{'-'.join(filter(None, words))}", box, box.holds(job))


def parallel_specs(spec: ModelSpec, ranks: int) -> Iterator[ParallelSpec]:
    """Every tensor, pipeline and data degree with the product ``ranks`` that is legal for the model."""
    degrees = [2**power for power in range(ranks.bit_length())]
    for tp, pp in ((tp, pp) for tp in degrees for pp in degrees if tp * pp <= ranks):
        if pp <= spec.total_layers and spec.heads % tp == 0:
            yield ParallelSpec(tp=tp, pp=pp, dp=ranks // (tp * pp))


def box_cases() -> list[BoxCase]:
    """Every case, the smallest ranks first: all strategies on nodes of one rank, and the runs of ``cases.toml``."""
    found = [
        case(model, spec, read_box(f"{ranks}x1@{RATE}mbit"), parallel)
        for model, spec in MODELS.items()
        for ranks in SIZES
        for parallel in parallel_specs(spec, ranks)
    ]
    for row in cases("box")["runs"]:
        box = read_box(row["box"])
        if "mbits_per_s" in row:  # of each node's link
            box = replace(box, mbits_per_s=tuple(map(float, row["mbits_per_s"])))
        spec = replace(MODELS[row["model"]], **row.get("sizes", {}))
        named = row.get("batches", 0), row.get("suffix", "")
        for one in (case(row["model"], spec, box, ParallelSpec(**way), *named) for way in row["ways"]):
            stragglers = tuple(Straggler(**each) for each in row.get("stragglers", ()))
            job = replace(one.job, cluster=replace(one.job.cluster, stragglers=stragglers)) if stragglers else one.job
            found.append(replace(one, job=job))
    by_name = {one.name: one for one in found}
    return sorted(by_name.values(), key=lambda one: (one.job.cluster.num_devices, one.box.name, one.name))


PROFILED = [read_box(text) for text in cases("box")["profiled"]]  # boxes in which collectives are measured alone


def collectives_of(box: Box) -> list[Collective]:
    """Measurements of a box's collectives."""
    ranks, near, sizes = box.num_ranks, box.ranks_per_node, cases("box")["bytes"]
    layouts = sorted(layout for layout in {(ranks, near), (box.nodes, 1), (near, near)} if layout[0] > 1)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    found = [Collective(kind, n, *layout) for layout in layouts for kind in kinds for n in sizes["collectives"]]
    return found + [Collective("send_recv", n, 2, here) for here in (1, 2) if here <= near for n in sizes["messages"]]


def sleeping(box: Box) -> SleepingLatency:
    """Sleeping times of the box's ranks, and its links from their facts."""
    return SleepingLatency(PRESETS[HARDWARE], box.links)


def measure_cases(cases: Sequence[BoxCase], out: Path) -> list[str]:
    """Run missing cases, one collection per box, small boxes first, and what ops and collectives take on their own;
    names of runs that used too much of the cores. All of a box's runs take turns, so that a drift of the machine
    touches them alike.
    """
    rejected, boxes = [], dict[Box, list[BoxCase]]()
    # The work that a box's ranks really compute: copies and sums of gradients.
    ops = [Op(kind, (2**power,), "fp32") for kind in ("add", "copy", "elementwise") for power in (10, 16, 18, 20, 21)]
    for box in PROFILED:
        plan = box_plan(box, [], sleeping(box), collectives=collectives_of(box), ops=ops, event_seconds=EVENT_SECONDS)
        run_plan(plan, out / PROFILE / f"events-{box.name.replace('@', '-')}", progress=True)
    for found in cases:
        boxes.setdefault(found.box, []).append(found)
    for box, held in sorted(boxes.items(), key=lambda pair: (pair[0].num_ranks, pair[0].name)):
        role = "judge" if held[0].judges else "train"
        runs = [(each.file_name, role, each.job, {**COUNTS, "rounds": ROUNDS[role]}) for each in held]
        summary = run_plan(box_plan(box, runs, sleeping(box)), held[0].folder(out), progress=True)
        rejected += [each.name for each in held if each.file_name in summary["rejected"]]
    return rejected


# Passes of micro-batches: rows of rank, kind (an index of ``KIND_NAMES``), part, micro-batch, start and end in seconds
# from the begin of the iteration, in the order of the first four; and begin and end of each rank's optimizer, sums of
# gradients included, ``(ranks, 2)``.
Passes = tuple[Array, Array]


def measured_passes(steps: Sequence[dict[str, Any]]) -> Passes:
    """Activity of the ranks: medians over the records of steps that the harness's ``measure.noted_steps`` returns."""
    tables, optimizers = [], []
    for step in steps:
        rows, optimizer = [], np.zeros((len(step["spans"]), 2))
        for rank, spans in enumerate(step["spans"]):
            for label, part, micro_batch, *ends in spans:
                start, end = (at - step["begin"] for at in ends)
                if label in LABELS:
                    rows.append((rank, KIND_NAMES.index(LABELS[label]), part, micro_batch, start, end))
                elif label == "optimizer":
                    optimizer[rank] = start, end
        tables.append(_in_order(np.array(rows, dtype=np.float64)))
        optimizers.append(optimizer)
    return np.median(tables, axis=0), np.median(optimizers, axis=0)


def predicted_passes(simulation: Simulation) -> Passes:
    """Simulated passes of every rank."""
    parallel, track = simulation.job.parallel, simulation.lowered.track
    pipelines = {replica: one for one in simulation.pipeline_runs for replica in one.pipeline.replicas}
    tables: list[Array] = []
    optimizer = np.zeros((simulation.job.cluster.num_devices, 2))
    for rank in range(len(optimizer)):
        stage, within = divmod(rank, parallel.tp * parallel.dp)  # ranks of a stage are adjacent
        pipeline = pipelines[within // parallel.tp]
        own = np.flatnonzero(track.stage == stage)
        done = pipeline.clocks[stage].max()  # and all overlapping messages
        ends = pipeline.run.log.finish[own, 0].copy()
        if parallel.pp == 1:  # DDP and FSDP2 wait for the group of every replica within the last backward
            done = max(other.clocks[stage].max() for other in simulation.pipeline_runs)
            ends[np.argmax(ends)] = done
        what = (np.full(len(own), rank), track.kind[own], track.part[own], track.micro_batch[own])
        tables.append(np.stack([*what, pipeline.run.log.start[own, 0], ends], axis=1))
        optimizer[rank] = done, simulation.finish[stage].max()
    return _in_order(np.concatenate(tables)), optimizer


def _in_order(table: Array) -> Array:
    return table[np.lexsort(table[:, 3::-1].T)]


def compare_cases(cases: Sequence[BoxCase], out: Path, predictor: Predictor) -> list[tuple[BoxCase, Row, Array]]:
    """Predict every case that ran, and compare it; cases for which the box was too busy have no run.

    Of each, figures as ``--json`` prints them, and by how much starts and ends of passes are off, in parts of the
    iteration, ``(2 * num_passes,)``. ``spread_s``: largest less smallest of the repeats; ``cpu``: percent of the cores'
    time that the ranks computed, in the busiest repeat; ``activity_error``: seconds by which lengths of passes and
    optimizer are off, over their sum, mean over ranks; ``timestamp_error``: the median of those.
    """
    found = []
    for case in cases:
        folder = case.folder(out) / "runs" / case.file_name
        if not (folder / "manifest.json").exists():
            continue
        run = read_manifest(folder)
        if run.job != case.job:
            raise CollectError(f"a folder holds one study: {folder} is of another job than {case.name}; choose another")
        steps, seconds = read_json(folder / "records.json")["steps"], run.iteration_time_s
        prediction = predict(case.job, predictor)
        (real, closing), (said, told) = measured_passes(steps), predicted_passes(prediction.simulation)
        if not np.array_equal(real[:, :4], said[:, :4]):
            raise CollectError(f"ranks must run the schedule's passes, got others in {case.name}")
        scale = prediction.iteration_time_s / prediction.simulation.iteration_time_s
        ranks, lengths, last = real[:, 0].astype(np.int64), real[:, 5] - real[:, 4], closing[:, 1] - closing[:, 0]
        off = np.bincount(ranks, np.abs((said[:, 5] - said[:, 4]) * scale - lengths), minlength=len(last))
        off += np.abs((told[:, 1] - told[:, 0]) * scale - last)
        activity = off / (np.bincount(ranks, lengths, minlength=len(last)) + last)
        stamps = np.abs(np.concatenate([said[:, at] * scale - real[:, at] for at in (4, 5)])) / seconds
        waits = sum(value for key, value in prediction.breakdown.items() if key.endswith("_communication"))
        figures = {
            "name": case.name,
            "ranks": case.job.cluster.num_devices,
            "measured_s": seconds,
            "spread_s": max(run.step_seconds) - min(run.step_seconds),
            "predicted_s": prediction.iteration_time_s,
            "low_s": prediction.low_s,
            "high_s": prediction.high_s,
            "error": 100 * (prediction.iteration_time_s / seconds - 1),
            "activity_error": 100 * float(activity.mean()),
            "timestamp_error": 100 * float(np.median(stamps)),
            "cpu": 100 * max(float(step["cpu"]) for step in steps),
            "communication_bound": waits / prediction.iteration_time_s > COMMUNICATION_BOUND,
        }
        found.append((case, figures, stamps))
    return found


class Silent(SleepingLatency):
    """Communication takes no time."""

    def collective_seconds(self, collectives: Sequence[Collective]) -> Seconds:
        return np.full(len(collectives), _NOTHING_S)


def by_facts(job: Job, kind: type[SleepingLatency] = SleepingLatency) -> Simulation:
    """The same simulator with hardware facts, without training."""
    assert isinstance(job.fabric, Fabric)
    return simulate(job, kind(PRESETS[HARDWARE], job.fabric))


def formula(job: Job) -> float:
    """Seconds by the closed form of automatic planners, without the optimizer."""
    terms = closed_form(by_facts(job))
    return sum(terms.values()) - terms["optimizer"]


def run_boxes(out: Path, only: str = "*") -> Row:
    """Measure, train, predict and compare the runs whose names match ``only``; a second call continues. What trains is
    always measured whole.
    """
    check_writable(out)
    wanted = [case for case in box_cases() if fnmatch(case.name, only)]
    if not wanted:
        raise CollectError(f"--only must match a run such as box/gpt2/2M2P4D, got {only!r}")
    training = [case for case in box_cases() if not case.judges]
    rejected = measure_cases([*training, *(case for case in wanted if case.judges)], out)
    folders = sorted(plan.parent for plan in (out / PROFILE).glob("*/plan.json"))  # it trains again when they change
    key = digest(*(str(sorted(path.name for path in folder.glob("*/*"))) + folder.name for folder in folders))[:8]
    if (out / f"predictor-{key}" / "manifest.json").exists():
        predictor = Predictor.load(out / f"predictor-{key}")
    else:
        uri = f"sqlite:///{(out / 'mlflow.db').resolve()}"
        predictor = train(folders, out / f"predictor-{key}", hardware_name=HARDWARE, tracking_uri=uri)
    small, judged = (compare_cases([case for case in wanted if case.judges == large], out, predictor)
                     for large in (False, True))  # fmt: skip
    if not judged and not small:
        raise CollectError(f"every run of {only!r} used too much of the cores to be valid: {', '.join(rejected)}")
    summary = summarise_boxes(judged or small, predictor)
    summary["rejected"] = [name for name in rejected if fnmatch(name, only)]
    summary["in_sample"] = [figures for _, figures, _ in small]
    write_json(out / "box.json", summary)
    write_text(out / "box.txt", box_text(summary) + "\n")
    plot_predicted_against_measured(summary["runs"], out / "box.png", "clusters in a box: what was never trained on")
    return summary


def summarise_boxes(rows: Sequence[tuple[BoxCase, Row, Array]], predictor: Predictor) -> Row:
    """Figures of compared runs, errors in per cent; beside them those of other methods on the same runs."""
    cases, told, stamps = zip(*rows, strict=True)
    predicted, measured = (np.array([row[key] for row in told]) for key in ("predicted_s", "measured_s"))
    names = [case.name.split("/")[1] for case in cases]
    models = {name: np.array([other == name for other in names]) for name in dict.fromkeys(names)}
    ranks = [spearman(predicted[own], measured[own]) for own in models.values() if own.sum() > 2]
    fair = [at for at, case in enumerate(cases) if not case.job.cluster.stragglers]
    groups = [(names[at], cases[at].box.name) for at in fair]
    batches = np.array([case.job.batch.global_batch for case in cases])  # times for each sequence of a batch
    ways: dict[str, Callable[[Job], float]] = {
        "regressors and context model": lambda job: predict(job, predictor).iteration_time_s,
        "regressors alone": lambda job: predict(job, predictor.without_context).iteration_time_s,
        "roofline, latency and bandwidth": lambda job: by_facts(job).iteration_time_s,
        "ideal arithmetic": lambda job: by_facts(job, Silent).iteration_time_s,
        "closed formula": formula,
    }
    off = {name: 100 * np.abs([way(case.job) for case in cases] / measured - 1) for name, way in ways.items()}
    bound = [abs(row["error"]) for row in told if row["communication_bound"]]
    return {
        "runs": list(told),
        "mean_error": float(np.mean([abs(row["error"]) for row in told])),
        "max_error": max(abs(row["error"]) for row in told),
        "communication_bound_runs": len(bound),
        "communication_bound_error": float(np.mean(bound)) if bound else None,
        "activity_error": float(np.mean([row["activity_error"] for row in told])),
        "timestamp_error": 100 * float(np.median(np.concatenate(stamps))),
        "spearman": float(min(ranks)) if ranks else None,  # the least of a model
        "regret": regret(groups, (predicted / batches)[fair].tolist(), (measured / batches)[fair].tolist()) or 0.0,
        "coverage": 100 * float(np.mean([row["low_s"] <= row["measured_s"] <= row["high_s"] for row in told])),
        "others": {name: {"mean_error": float(of.mean()), "max_error": float(of.max())} for name, of in off.items()},
    }


def box_text(summary: Row) -> str:
    """The tables as text."""
    runs = [{**row, "name": row["name"] + (" *" if row["communication_bound"] else "")} for row in summary["runs"]]
    columns = {"run": "name", "ranks": "ranks", "measured s": "measured_s", "spread s": "spread_s",
               "predicted s": "predicted_s", "error %": "error", "activity %": "activity_error",
               "stamps %": "timestamp_error", "cpu %": "cpu"}  # fmt: skip
    same = [{"name": name, **of} for name, of in summary["others"].items()]
    lines = [
        table_of(runs, columns, 2),
        "* communication decides; spread: largest less smallest of three repeats; activity: lengths of what each rank "
        "did; stamps: begin and end of every pass, median, in parts of the iteration\n",
        figures_text(summary),
        "",
        table_of(same, {"the same runs by": "name", "mean error %": "mean_error", "max %": "max_error"}, 2),
    ]
    if summary["rejected"]:
        lines.append(f"\nleft out, cores more than 25 % busy: {', '.join(summary['rejected'])}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> tuple[Any, str]:
    """The names of the runs, or the whole study."""
    if options.list:
        names = [case.name for case in box_cases() if fnmatch(case.name, options.only)]
        return names, "\n".join(names)
    figures = run_boxes(options.out.resolve() / "box", options.only)
    return {"box": figures}, box_text(figures)


OPTIONS: Options = {
    "--out": {"type": Path, "default": Path("runs/small-to-large"), "help": "folder of everything; resumed"},
    "--only": {"default": "*", "metavar": "GLOB", "help": "names of the runs: box/gpt2/2M2P4D, box/*"},
    "--list": {"action": "store_true", "help": "print the names of the runs"},
}
STUDY = Study("small-to-large", __doc__ or "", run, OPTIONS)
