"""The work of one world size of a plan on one rank: rounds over runs, then event files.

State on disk, so that a killed collection loses at most the round it was in: ``.rounds/<name>.json`` holds a run's
finished rounds until the run is complete and moves to ``runs/<name>/``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base import annotate, cores
from ..base.atomic_files import new_folder, write_json
from ..base.collective_calls import barrier, gather
from ..base.errors import HarnessError
from ..emulation import stand_in
from ..measuring.device import Sample, Watch, clocks, fingerprint, free_memory, gpu_name, out_of_memory
from ..measuring.op_events import measure_events
from ..measuring.timing import noted_steps, profiled_steps, timed_steps
from ..models.parallel import ParallelTraining, Training, end_groups
from ..models.sleeping import WARM_UP_PACE, SleepingTraining
from ..ops.composite import enable_compiling
from ..plan import plan_checks as plans
from .progress import ROUND_UNITS, is_done, least_certain, read_rounds, rounds_path
from .workers import join


class Collection:
    """The runs and events of a plan with this process group's world size, in a folder that all ranks share.

    On rank 0 ``report`` is called with what has begun: ``doing`` (text) and ``done`` (units of work).
    """

    def __init__(self, plan: dict[str, Any], out: Path, report: Callable[..., None]) -> None:
        self.plan, self.out, self._report = plans.check_plan(plan), out, report
        torch.set_num_threads(1)
        local_rank, self.local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.boxed = {"box": self.plan["box"]} if "box" in self.plan else {}
        wanted = "cpu" if self.boxed else self.plan["device"]  # no rank computes in a box
        self.device = _device(wanted, local_rank, self.local_size)
        shared = [run["name"] for run in self.plan["runs"] if run["job"]["parallel"].get("cp", 1) > 1]
        if shared and self.device.type != "cpu":
            rule = "the harness runs context parallelism with PyTorch's attention of CPUs: hide the GPU"
            raise HarnessError(f"{rule} (device cpu), or leave it out, got a {self.device.type} for {shared[0]}")
        if self.boxed:
            cores.hurry_communication()
        nccl = self.device.type == "cuda" and int(os.environ["WORLD_SIZE"]) > 1  # a single rank has no communication
        with cores.any_core():
            join("nccl" if nccl else "gloo", self.device if nccl else None)
        if self.boxed:
            cores.go_first()
        elif self.device.type == "cpu":  # a GPU's rank is left alone: its autograd thread needs a core beside it
            cores.pin(local_rank)
        torch.backends.cuda.matmul.allow_tf32 = False  # fp32 is fp32, whatever the environment says
        annotate.install()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.versions = {"torch": torch.__version__, "python": platform.python_version()}
        self.fingerprint = fingerprint(self.device)
        self.compile = {"compile": True} if "compile" in self.plan else {}
        if self.compile:
            self._say("compiling")
            enable_compiling(self.device)
        self._watch = Watch(gpu_name(self.device)) if self.device.type == "cuda" else None
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)  # of each run

    def run(self) -> None:
        """Do all work of this world size that is not on disk yet."""
        if self.rank == 0 and not (self.out / "fingerprint.json").exists():
            write_json(self.out / "fingerprint.json", self.fingerprint)
        try:
            self._runs()
            self._events()
        finally:
            if self._watch is not None:
                self._watch.stop()
        barrier()

    def _say(self, doing: str, done: int = 0) -> None:
        if self.rank == 0:
            self._report(doing=doing, done=done)

    def _agreed(self, value: Any) -> Any:
        """Rank 0's value on every rank: ranks must not decide by their own view of the file system."""
        return gather(value if self.rank == 0 else None)[0]

    def _runs(self) -> None:
        mine = [run for run in self.plan["runs"] if plans.ranks_needed(run) == self.size]
        runs = [run for run in mine if not self._agreed(is_done(self.out, run["name"]))]
        state: dict[str, dict[str, Any]] = {}
        for run in runs:
            found = read_rounds(self.out, run)
            if "extra_seconds" not in self.plan:  # the last round also profiles, so it is done again
                found |= {key: found[key][: run["rounds"] - 1] for key in ("rounds", "records")}
            state[run["name"]] = self._agreed(found)
        for number in range(max((run["rounds"] - 1 for run in runs), default=0)):
            for run in runs:
                if len(state[run["name"]]["rounds"]) <= number < run["rounds"] - 1:
                    self._round(run, state[run["name"]])
        # This world size's part of the plan's extra seconds is for the runs whose median is least certain.
        end = time.monotonic() + self.plan.get("extra_seconds", 0.0) * len(runs) / max(1, len(self.plan["runs"]))
        while runs and "extra_seconds" in self.plan:
            rounds = {name: of["rounds"] for name, of in state.items() if not is_done(self.out, name)}
            chosen = self._agreed(least_certain(rounds) if time.monotonic() < end else None)
            if chosen is None:
                break
            self._round(next(run for run in runs if run["name"] == chosen), state[chosen])
        for run in runs:
            self._round(run, state[run["name"]], last=True)

    def _round(self, run: dict[str, Any], state: dict[str, Any], *, last: bool = False) -> None:
        """Do a round of a run, unless the run was rejected; the last round profiles, and writes the run."""
        name, number = run["name"], len(state["rounds"])
        if self._agreed(is_done(self.out, name)):
            return
        extra = number >= run["rounds"] - 1 and not last
        self._say(f"{name} extra round" if extra else f"{name} round {number + 1}/{max(number + 1, run['rounds'])}")
        free_memory()  # free the memory of other runs
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with stand_in.world(run, self.device) if "stand_in" in run else nullcontext():
                self._train(run, number, state, last)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            self._say(name, done=0 if extra else ROUND_UNITS)
            return
        with new_folder(self.out / "rejected" / name, self.out / ".partial" / name) as folder:  # it is not tried again
            write_json(folder / "manifest.json", {**self._head(run), "rounds": [], "rejected": reason})
        rounds_path(self.out, name).unlink(missing_ok=True)
        if self.size > 1:  # the others wait for this rank in vain
            raise RuntimeError(f"{name} was skipped: out of memory; run again to continue with the rest: {reason}")
        self._say(name, done=ROUND_UNITS * max(1, run["rounds"] - number))

    def _train(self, run: dict[str, Any], number: int, state: dict[str, Any], last: bool) -> None:
        """Build, time, and in the last round profile and write."""
        training: ParallelTraining | None = SleepingTraining(run, self.device) if "sleeps" in run else None
        training = training or Training(run["job"], self.device, run.get("table", ""))
        built = time.monotonic()
        self._steps(run, number, state, training)
        if self._watch is not None:
            self._samples[run["name"]] += self._watch.since(built)
        if last:
            self._finish(run, state, training)
        elif self.rank == 0:
            write_json(rounds_path(self.out, run["name"]), state)
        barrier()
        groups = training.mesh, list(training.groups.values())
        del training
        end_groups(*groups)

    def _head(self, run: dict[str, Any]) -> dict[str, Any]:
        """The first fields of a manifest."""
        own = {key: run[key] for key in ("name", "role", "job")}
        facts = {"world_size": self.size, "fingerprint": self.fingerprint, "versions": self.versions}
        return {"schema": 1, **own, **facts, **self.compile}

    def _steps(self, run: dict[str, Any], number: int, state: dict[str, Any], training: ParallelTraining) -> None:
        """Time a round's steps, and add them to the run's ``state``."""
        if isinstance(training, SleepingTraining):
            training.hurry(WARM_UP_PACE)
            noted_steps(training, run["warmup"])
            training.hurry(1.0)
            seconds, records = noted_steps(training, run["steps"])
            state["records"].append(records)
            state["losses"] = [0.0] * (run["warmup"] + run["steps"])
        else:
            _, losses = timed_steps(training, run["warmup"])
            seconds, more = timed_steps(training, run["steps"])
            if number == 0:  # the mean over replicas: only ranks of the last stage know their losses
                known = gather([float(loss) for loss in losses + more] if training.last else None)
                replicas = [column for column in known if column is not None]
                state["losses"] = [sum(column) / len(replicas) for column in zip(*replicas, strict=True)]
        state["rounds"].append(seconds)

    def _finish(self, run: dict[str, Any], state: dict[str, Any], training: ParallelTraining) -> None:
        """Profile, and move the run's folder to its place."""
        folder = self.out / ".partial" / run["name"]
        cpu = max((record["cpu"] for steps in state["records"] for record in steps), default=0.0)
        place = "runs" if cpu <= plans.MOST_CPU else "rejected"
        with new_folder(self.out / place / run["name"], folder) if self.rank == 0 else nullcontext():
            barrier()
            self._profile(run, state, training, folder)
        rounds_path(self.out, run["name"]).unlink(missing_ok=True)

    def _profile(self, run: dict[str, Any], state: dict[str, Any], training: ParallelTraining, folder: Path) -> None:
        """Write this rank's traces, and on rank 0 the manifest."""
        seconds: list[float] = []
        traces: dict[str, str] = {}
        first = run["stand_in"]["rank"] if "stand_in" in run else 0
        if run["profile_steps"]:
            seconds, traces = profiled_steps(training, run["profile_steps"], folder, first + self.rank)
        digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in traces.values()}
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        ranks = gather((traces, digests, memory, self._samples.pop(run["name"], [])))
        if self.rank != 0:
            return
        names, files, peaks, samples = zip(*ranks, strict=True)
        manifest = {
            **self._head(run),
            **{key: state[key] for key in ("rounds", "losses")},
            "profiled_seconds": seconds,
            "peak_memory_bytes": [*peaks] if memory is not None else [],
            "traces": {str(rank): of for rank, of in enumerate(names, first) if of},
            "digests": {name: digest for of in files for name, digest in of.items()},
            **clocks(samples),
        }
        if "stand_in" in run:
            manifest["stand_in"] = {"rank": first}
        if self.boxed:
            manifest |= self.boxed
            write_json(folder / "records.json", {"steps": [step for steps in state["records"] for step in steps]})
        write_json(folder / "manifest.json", manifest)

    def _events(self) -> None:
        for event in self.plan["events"]:
            path = self.out / "events" / f"{event['name']}.json"
            if event["world_size"] != self.size or self._agreed(path.exists()):
                continue
            self._say(f"events {event['name']}")
            free_memory()
            if self.size == 1 and self.device.type == "cpu":
                cores.compute_in_real_time()
            began = time.monotonic()
            result = measure_events(event, self.device, self._say, asleep=bool(self.boxed))
            samples = gather(self._watch.since(began) if self._watch is not None else [])
            if self.rank == 0:
                head = {"schema": 1, "busy": self.local_size, "world_size": self.size, **self.compile, **self.boxed}
                facts = {"fingerprint": self.fingerprint, "versions": self.versions, **clocks(samples)}
                write_json(path, {**head, **facts, **result})


def _device(wanted: str, local_rank: int, local_size: int) -> torch.device:
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if gpus == 0 and wanted != "cuda":
        return torch.device("cpu")
    if local_size > gpus:
        raise HarnessError(f"every rank needs its own GPU: ranks per node <= GPUs must hold, got {local_size} > {gpus}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
