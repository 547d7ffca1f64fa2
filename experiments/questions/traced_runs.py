"""What one replay of a traced run tells: how exact it is, why the run is slow, and what changes would gain."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.errors import StepsightError, shorten
from stepsight.dataset.base.files import write_pieces
from stepsight.dataset.graph.columns import merge, overlap
from stepsight.dataset.graph.program import COLLECTIVE, OP, Program
from stepsight.dataset.hardware.hardware import Fabric
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_folder import TracedRun, has_traces, is_imported, read_imported, run_folders, run_graphs
from stepsight.dataset.runs.run_manifest import read_manifest, read_object
from stepsight.experiments.questions.traced_device import latency_of, traced_device
from stepsight.experiments.reports.text_table import Columns, Number, table_of
from stepsight.simulator.replay import changes
from stepsight.simulator.replay.causes import COMMUNICATION, HOST_BOUND, LOADER, PEERS, breakdown, longest_path
from stepsight.simulator.replay.replay import Replay, replay
from stepsight.simulator.replay.step_timeline import kernel_table, launch_table, traced_timeline
from stepsight.training.corrections.intervals import seconds_text
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor

Change = Callable[[Sequence[Program], changes.Tally], list[Program]]
LEAST_SHARE = 0.02  # of the step: causes whose removal saves less are not printed
SMALL_BYTES, LARGE_BYTES = 1 << 20, 16 << 20
SLOW_LINK = 0.4  # share of the stated bandwidth: a large collective below it does not use the stated links
THROTTLED = ("power_cap", "hardware_slowdown", "thermal", "hardware_thermal", "hardware_power_brake")
MOST_NODES, MOST_RANKS = 20, 8  # that are printed: of the critical path, and of exposed communication
THROTTLING = "throttling"
_ADVICE: dict[str, str] = read_toml(Path(__file__).with_name("advice.toml"))  # by cause


def one_run(path: Path, verb: str, *, traced: bool = False) -> Path:
    """The folder of the only run (the only traced run) of a path."""
    folders = [folder for folder in run_folders(path) if not traced or has_traces(folder)]
    if len(folders) != 1:
        what = "one traced run" if traced else "one run"
        raise StepsightError(f"{verb} takes {what}, got {len(folders)} in {path}: name one folder of its runs/")
    return folders[0]


def measured_step(folder: Path) -> float:
    """Median seconds of a run's steps without a profiler; 0 if none was timed."""
    if is_imported(folder):
        return read_imported(folder).timed_s
    return statistics.median(read_manifest(folder).step_seconds or (0.0,))


@dataclass(frozen=True, eq=False)
class ReplayedRun:
    """One traced run and its replay: what ``replay``, ``doctor`` and ``what-if`` all answer from."""

    run: TracedRun  # as it was read
    # of its ranks; where steps were timed without a profiler too, the host is as fast as in those
    graphs: Sequence[Program]
    profiled: Replay  # the replay of the graphs as they were traced
    base: Replay  # the replay of ``graphs``: the step that all causes and changes are compared with

    @classmethod
    def of(cls, source: TracedRun | Path) -> ReplayedRun:
        """Replay a run, or the run of a folder."""
        run = run_graphs(source) if isinstance(source, Path) else source
        profiled = replay(run.graphs)
        if not run.iteration_s:
            return cls(run, run.graphs, profiled, profiled)
        graphs = changes.as_timed(run.graphs, run.iteration_s)
        return cls(run, graphs, profiled, replay(graphs))

    @property
    def warnings(self) -> list[str]:
        """Of reading the traces."""
        return list(dict.fromkeys(warning for graph in self.graphs for warning in graph.warnings))

    def step_with(self, change: Change) -> float:
        """Seconds of a step with a change."""
        return replay(change(self.graphs, changes.Tally())).replayed_s

    def exposed(self) -> list[dict[str, Any]]:
        """Communication beside which a rank computes nothing: rank, seconds of a step, and percent of it."""
        start, end = self.base.walked.arrivals(), self.base.walked.end_s
        found, steps = [], {each.rank: each.replayed_s for each in self.base.ranks}
        for graph, first in zip(self.graphs, self.base.walked.joined.first, strict=False):
            spans = np.stack([each[first : first + len(graph)] for each in (start, end)], axis=1)
            inside = graph.columns["step"] >= 0
            compute, sent = (merge(spans[inside & (graph.columns["kind"] == kind)]) for kind in (OP, COLLECTIVE))
            alone = float((sent[:, 1] - sent[:, 0] - overlap(compute, sent[:, 0], sent[:, 1])).sum())
            seconds, step_s = alone / max(len(graph.steps_s), 1), steps.get(graph.rank, 0.0)
            found.append({"rank": graph.rank, "seconds": seconds, "percent": 100.0 * seconds / step_s if step_s else 0})
        return found

    def critical_path(self) -> list[dict[str, Any]]:
        """Nodes of the longest path through the steps, in time: rank, stream, name, kind, start and seconds."""
        joined, walked, found = self.base.walked.joined, self.base.walked, list[dict[str, Any]]()
        for node in longest_path(walked)[::-1]:
            graph, own = joined.located(node)
            if graph is not None:  # ranks meet in nodes of their own
                where = {"rank": graph.rank, "stream": graph.streams[graph.columns["stream"][own]]}
                what = {"name": graph.names[graph.columns["name"][own]], "kind": graph.kind_of(own)}
                times = {"start_s": float(walked.start_s[node]), "seconds": float(joined.seconds[node])}
                found.append({**where, **what, **times})
        return found

    def causes(self, fabric: Fabric | None = None) -> list[dict[str, Any]]:
        """What makes the step longer, the largest first: ``cause``, ``seconds`` and ``saved_percent`` of a step without
        it (as ``what-if`` says of the same change), ``evidence`` and ``advice``.
        """
        fabric = fabric or (None if self.run.job is None else self.run.job.fabric)
        told = breakdown(self.graphs)
        steps = told.steps_s or 1.0
        idle = {
            cause: f"the device idles {1e3 * told.idle.get(cause, 0.0):.1f} ms of {1e3 * steps:.1f} ms for it"
            for cause in (LOADER, PEERS)
        }
        tried: list[tuple[str, str, Change]] = []
        if all(graph.device != "cpu" for graph in self.graphs):
            host, path = (1e3 * each for each in (told.critical.get("host", 0.0), sum(told.critical.values())))
            evidence = f"the host's own work is {host:.1f} ms of {path:.1f} ms on the critical path"
            tried.append((HOST_BOUND, evidence, changes.as_device_graph))
        if any(len(graph.loading_s) for graph in self.graphs):
            loaded = lambda graphs, _: [changes.host_scaled(each, 1.0, loading=0.0) for each in graphs]
            tried.append((LOADER, idle[LOADER], loaded))
        if len(self.graphs) > 1:
            tried.append((PEERS, idle[PEERS], changes.without_straggler))
        if told.communication_s:
            most = max(self.exposed(), key=lambda each: float(each["seconds"]))
            spent = f"{1e3 * most['seconds']:.1f} ms of it, the most of all"
            evidence = f"rank {most['rank']} computes nothing beside {spent}"
            tried.append((COMMUNICATION, evidence, partial(changes.faster, what=changes.COMMUNICATION, factor=1e9)))
        tried += _of_messages(self.graphs, steps, fabric)
        found, step_s = list[dict[str, Any]](), self.base.replayed_s
        for name, evidence, change in tried:
            saved = max(step_s - self.step_with(change), 0.0)
            worth = {"seconds": saved, "saved_percent": 100.0 * saved / step_s if step_s else 0.0}
            found.append({"cause": name, **worth, "evidence": evidence, "advice": _ADVICE[name]})
        return sorted(found, key=lambda cause: -cause["saved_percent"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``stepsight replay --json`` prints them."""
        exposed = self.exposed()
        return {
            "run": self.run.name,
            **self.profiled.to_dict(),
            "step_s": self.base.replayed_s,
            "exposed_communication_s": {str(each["rank"]): each["seconds"] for each in exposed},
            "exposed_communication_percent": {str(each["rank"]): each["percent"] for each in exposed},
            "causes": self.causes(),
            "critical_path": self.critical_path(),
            "kernels": kernel_table(self.run.graphs),
            "launches": launch_table(self.run.graphs),
            "warnings": self.warnings,
        }


def write_timeline(folder: Path, to: Path) -> str:
    """Write the measured timeline of a run for Perfetto, with its critical path, causes of idle times and launches, and
    the duration that is predicted for each op and collective if the traced device is known.  Returns what was written.
    """
    found, predicted, told = ReplayedRun.of(one_run(folder, "--timeline", traced=True)), None, f"wrote {to}"
    try:
        model = latency_of(*traced_device(found.run))
        seconds = [np.append(changes.sized_seconds(model, graph.works), np.nan) for graph in found.run.graphs]
        predicted = [each[graph.columns["work"]] for each, graph in zip(seconds, found.run.graphs, strict=True)]
    except StepsightError as error:
        told += f", without predicted durations: {error}"
    write_pieces(to, traced_timeline(found.profiled.walked, predicted, found.run.name))
    return told


def _of_messages(graphs: Sequence[Program], steps: float, fabric: Fabric | None) -> list[tuple[str, str, Change]]:
    """Many small messages, and large ones that do not reach the links' bandwidth; the change that removes each."""
    sent = [
        (work, float(graph.duration_s[node]))
        for graph in graphs
        for node in np.flatnonzero(graph.on_device & (graph.columns["step"] >= 0)).tolist()
        if isinstance(work := graph.works[graph.columns["work"][node]], Collective)
    ]
    found: list[tuple[str, str, Change]] = []
    small = [seconds for work, seconds in sent if _is_small(work)]
    if sum(small) / steps > LEAST_SHARE and len(small) > len(sent) / 2:
        evidence = f"{len(small)} of {len(sent)} collectives have less than 1 MiB and take {1e3 * sum(small):.1f} ms"
        found.append(("small_messages", evidence, partial(_scaled, chosen=_is_small, factor=0.0)))
    across = [work.num_bytes / seconds for work, seconds in sent if _is_across(work) and seconds > 0]
    if fabric is not None and across:
        reached, stated = statistics.median(across), fabric.inter_node.bandwidth_bytes_per_s
        if reached < SLOW_LINK * stated:
            rates = f"{reached / 1e9:.2f} GB/s, the fabric states {stated / 1e9:.2f} GB/s"
            evidence = f"collectives of 16 MiB and more between nodes reach {rates}"
            found.append(("slow_transport", evidence, partial(_scaled, chosen=_is_across, factor=reached / stated)))
    return found


def _is_small(work: Op | Collective) -> bool:
    return isinstance(work, Collective) and work.num_bytes < SMALL_BYTES


def _is_across(work: Op | Collective) -> bool:
    return isinstance(work, Collective) and work.num_bytes >= LARGE_BYTES and work.ranks_per_node < work.group_size


def _scaled(
    graphs: Sequence[Program], _: changes.Tally, chosen: Callable[[Op | Collective], bool], factor: float
) -> list[Program]:
    """The graphs with the durations of some collectives times a factor."""
    out = []
    for graph in graphs:
        which = np.array([*map(chosen, graph.works), False], dtype=np.bool_)[graph.columns["work"]]
        out.append(graph.replace(duration_s=np.where(which, graph.duration_s * factor, graph.duration_s)))
    return out


def replay_runs(path: Path) -> dict[str, Any]:
    """Replay a run, or every run of a collection: then the totals, and each run under ``runs``."""
    folders = run_folders(path)
    told = [ReplayedRun.of(each).to_dict() for each in [*filter(has_traces, folders)] or folders[:1]]
    if len(told) == 1:
        return told[0]
    measured, replayed = (sum(each[key] for each in told) for key in ("measured_s", "replayed_s"))
    streams = [{"run": each["run"], **stream} for each in told for stream in each["streams"]]
    error = 100.0 * (replayed / measured - 1.0) if measured else 0.0
    return {"measured_s": measured, "replayed_s": replayed, "error_percent": error, "streams": streams, "runs": told}


_STREAMS: Columns = {
    **{name: name for name in ("rank", "stream")},
    "busy ms": "measured_busy_s",
    "replayed ms": "replayed_busy_s",
    "error %": lambda row: Number(row["error_percent"], 2),
    "unexplained idle ms": "unexplained_idle_s",
}
_NODES: Columns = {
    **{name: name for name in ("rank", "stream")},
    "longest on the critical path": lambda node: shorten(node["name"] or node["kind"], 60),
    "their ms": "seconds",
}
_KERNELS: Columns = {
    "kernel": lambda row: shorten(row["name"], 60),
    **{name: name for name in ("kind", "count")},
    "total ms": "seconds",
    "%": "percent",
    **{f"{of} ms": f"{of}_s" for of in ("mean", "min", "max")},
}
_LAUNCHES: Columns = {
    **{name: name for name in ("rank", "launches")},
    **{f"{of} from launch to start ms": f"{of}_delay_s" for of in ("mean", "median", "max")},
    "outstanding, mean": "mean_queue",
    "most": "max_queue",
}


def replay_text(told: dict[str, Any]) -> str:
    blocks = []
    for each in told.get("runs", [told]):
        path = sorted(each["critical_path"], key=lambda node: -node["seconds"])[:MOST_NODES]
        lost, launches = each["unrecorded_percent"], each["launches"][:MOST_RANKS]
        lines = [
            _exposed_text(each),
            f"{step_text(each)}, {each['steps']} step(s)",
            f"idle time without a known cause: {each['unexplained_percent']:.2f} % of the steps",
            *([f"work that the trace leaves out: {lost:.2f} % of the steps"] if lost else []),
            _causes_text(each["causes"]),
            table_of(each["streams"], _STREAMS, 3),
            table_of(path, _NODES, 3),
            table_of(each["kernels"][:MOST_NODES], _KERNELS, 3),
            *([table_of(launches, _LAUNCHES, 3)] if launches else []),
            *(f"warning: {warning}" for warning in each["warnings"]),
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _exposed_text(told: dict[str, Any]) -> str:
    """The communication that no computation hides, by rank."""
    percent = told["exposed_communication_percent"]
    ranks = [
        f"rank {rank} {1e3 * seconds:.3f} ms ({percent[rank]:.1f} %)"
        for rank, seconds in told["exposed_communication_s"].items()
    ]
    more = f", and {len(ranks) - MOST_RANKS} more (--json)" if len(ranks) > MOST_RANKS else ""
    return f"exposed communication of a step: {', '.join(ranks[:MOST_RANKS])}{more}"


def step_text(told: dict[str, Any]) -> str:
    measured, replayed, step = (1e3 * told[key] for key in ("measured_s", "replayed_s", "step_s"))
    timed = "" if step == replayed else f"; without a profiler {step:.3f} ms, which causes and changes refer to"
    error = f" ({told['error_percent']:+.2f} %)" if "error_percent" in told else ""
    return f"run {told['run']}: step measured {measured:.3f} ms, replayed {replayed:.3f} ms{error}{timed}"


def _causes_text(causes: Sequence[dict[str, Any]]) -> str:
    """The causes whose removal saves something."""
    worth = [c for c in causes if c["saved_percent"] > 100 * LEAST_SHARE or c["cause"] == THROTTLING]
    if not worth:
        return f"no cause was found whose removal saves {100 * LEAST_SHARE:g} % of the step"
    columns: Columns = {
        "cause": "cause",
        "saves ms": lambda cause: Number(1e3 * cause["seconds"], 3),
        "% of the step": "saved_percent",
        "evidence": "evidence",
        "what to do": "advice",
    }
    return table_of(worth, columns)


def diagnose(run: Path, job: Job | None = None, predictor: Predictor | str | None = None) -> dict[str, Any]:
    """The measured step of a traced run, the prediction beside it, exposed communication by rank, and ``causes``, with
    throttling, whose worth a replay does not know.
    """
    folder = one_run(run, "doctor", traced=True)
    found = ReplayedRun.of(folder)
    job = job or found.run.job
    told, measured = found.to_dict(), measured_step(folder)
    compared: dict[str, Any] = {"predicted_s": None}
    try:
        if job is not None:
            asked = predict(job, predictor)
            compared = {
                "predicted_s": asked.iteration_time_s,
                **{key: getattr(asked, key) for key in ("source", "low_s", "high_s")},
                "slower_percent": 100.0 * ((measured or found.base.replayed_s) / asked.iteration_time_s - 1.0),
                "predicted_breakdown": dict(asked.breakdown),
            }
    except StepsightError as error:
        compared["why_not_predicted"] = str(error)
    causes = found.causes(None if job is None else job.fabric) + _clock_causes(folder)
    kept = {key: told[key] for key in told if key.startswith("exposed") or key in ("run", "step_s", "warnings")}
    return {**kept, "measured_s": measured or found.profiled.measured_s, **compared, "causes": causes}


def _clock_causes(folder: Path) -> list[dict[str, Any]]:
    noted = read_object(folder / "manifest.json").get("clocks")
    reasons = noted.get("reasons", {}) if isinstance(noted, dict) else {}
    seen = {name: share for name, share in reasons.items() if name in THROTTLED and share > LEAST_SHARE}
    evidence = ", ".join(f"{name} in {100 * share:.0f} % of the samples" for name, share in seen.items())
    unknown = {"seconds": 0.0, "saved_percent": 0.0}
    return [{"cause": THROTTLING, **unknown, "evidence": evidence, "advice": _ADVICE[THROTTLING]}] if seen else []


def diagnosis_text(told: dict[str, Any]) -> str:
    line = f"run {told['run']}: measured {seconds_text(told['measured_s'])}"
    if told["predicted_s"] is not None:
        line += (
            f", predicted {seconds_text(told['predicted_s'])} "
            f"({seconds_text(told['low_s'])} to {seconds_text(told['high_s'])}): {told['slower_percent']:+.1f} %"
            f"\npredicted by {told['source']}"
        )
    elif "why_not_predicted" in told:
        line += f"\nnot predicted: {told['why_not_predicted']}"
    return "\n".join([_exposed_text(told), line, "", _causes_text(told["causes"])])
