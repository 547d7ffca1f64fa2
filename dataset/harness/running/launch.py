"""Collect a plan: one launch of worker processes per world size, resumable, in one folder.

The launcher itself needs the standard library alone.  The folder of this package can be copied anywhere::

    python -m harness plan.json --out DIR

``DIR`` then holds ``plan.json``, ``fingerprint.json``, ``runs/<name>/`` and ``events/<name>.json``, each complete or
absent, and ``logs/``.  Starting again with the same plan continues the collection.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..base import cores
from ..base.atomic_files import locked, read_json, write_json
from ..base.errors import HarnessError
from ..plan import plan_checks as plans
from .box import check_possible
from .progress import ROUND_UNITS, Progress, is_done, read_rounds
from .workers import how_ended, places, run_module

_UNBEGUN = (".lock", ".plan.json.")  # files that a launch leaves if it is killed before it has written the plan
_QUIET = 0.5  # cores that other processes may keep busy
_FORBIDDEN = (
    "threads of a box that communicate should run in real time, but this system forbids it (in a container: "
    "the cgroup's cpu.rt_runtime_us); runs take more of the cores and vary more"
)
__all__ = ["HarnessError", "collect", "main"]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code (2: a plan that cannot be collected here)."""
    parser = argparse.ArgumentParser(prog="harness", description="Collect traces and events for a plan.")
    parser.add_argument("plan", type=Path, help="plan.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the collection; resumed where it exists")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its workers too
    try:
        summary = collect(_read_plan(options.plan), options.out, progress=not options.quiet)
    except (HarnessError, OSError) as error:
        print("error: " + str(error).replace("\n", "\\n"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; start again with the same plan to go on", file=sys.stderr)
        return 130
    print(json.dumps(summary))
    return 0


def collect(plan: dict[str, Any], out: Path, *, progress: bool = True) -> dict[str, Any]:
    """Run and measure everything in a plan that is not in ``out`` yet, or raise a ``HarnessError``.

    Returns ``{"runs", "events"}`` (how many there are) and ``{"collected", "kept"}`` (how many of them are new); of a
    box and wherever there are any ``rejected``: names of runs that kept the cores too busy, or found too little memory.
    """
    plan = plans.check_plan(json.loads(json.dumps(plan)))  # as it will be read back: lists for tuples
    if "box" in plan:
        check_possible(plan["box"])
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for item in [*plan["runs"], *plan["events"]] if "box" not in plan else ():
        if (size := item["world_size"] if "world_size" in item else plans.ranks_needed(item)) > have:
            rule = "every rank needs a core of its own: ranks <= cores must hold"
            raise HarnessError(f"{rule}, got {size} > {have} for {item['name']}")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise HarnessError(f"a collection is a folder, got the file {out}")
    if (out / "plan.json").exists():
        if (other := _read_plan(out / "plan.json")) != plan:
            differs = _first_difference(other, plan)
            raise HarnessError(f"a folder has one plan: {out} has another one ({differs}); choose another folder")
    elif out.exists() and (found := [path for path in out.iterdir() if not path.name.startswith(_UNBEGUN)]):
        raise HarnessError(f"a new collection needs a new or empty folder, got {out} with {len(found)} entries")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".lock") as ours:
        if not ours:
            raise HarnessError(f"another collection is writing to {out}: wait for its end, or choose another folder")
        if not (out / "plan.json").exists():
            write_json(out / "plan.json", plan)
        unfinished, bar = _outstanding(out, plan), Progress(*_units(out, plan), shown=progress)
        if unfinished and progress:
            slow = _FORBIDDEN if "box" in plan and not cores.may_hurry() else ""
            for note in filter(None, (busy_note(), slow)):
                print(f"warning: {note}", file=sys.stderr)
        try:
            for size in sorted(set(unfinished.values())):
                _run_world(out, size, bar, "box" in plan)
        except KeyboardInterrupt:
            bar.end_line()
            raise
        if missing := [name for name, _ in _outstanding(out, plan)]:
            raise HarnessError(f"the workers ended without {', '.join(missing)}; see {out / 'logs'}")
        for scratch in (".rounds", ".partial"):
            shutil.rmtree(out / scratch, ignore_errors=True)
        bar.close(f"{len(plan['runs'])} runs and {len(plan['events'])} event files in {out}")
    counts, new = {"runs": len(plan["runs"]), "events": len(plan["events"])}, len(unfinished)
    rejected = [run["name"] for run in plan["runs"] if (out / "rejected" / run["name"]).exists()]
    counts |= {"collected": new, "kept": sum(counts.values()) - new}
    return {**counts, "rejected": rejected} if rejected or "box" in plan else counts


def _first_difference(old: Any, new: Any, place: str = "") -> str:
    """The first place where two plans differ, as ``runs.0.rounds``, and both values."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in {**new, **old} if old.get(key, ...) != new.get(key, ...))
        return _first_difference(old.get(key, "nothing"), new.get(key, "nothing"), f"{place}.{key}")
    return f"{place[1:]} is {old!s:.80} there and {new!s:.80} here"


def _read_plan(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise HarnessError(f"cannot read plan {path}: {error}") from None


def busy_note(seconds: float = 0.5) -> str:
    """Make a warning if other processes use this machine before the collection starts; "" if none do.

    The load average would still hold what came just before, such as the installation of this package.
    """
    before = _busy_seconds(), time.monotonic()
    time.sleep(seconds)
    others = (_busy_seconds() - before[0]) / (time.monotonic() - before[1])
    if others <= _QUIET:
        return ""
    return (
        f"measuring needs a quiet machine: others may keep {_QUIET} cores busy, got {others:.1f}; "
        "what is measured beside them is slower and varies more"
    )


def _busy_seconds() -> float:
    """Busy seconds of our cores since the machine started; 0 if unknown."""
    try:
        lines = Path("/proc/stat").read_text("utf-8").splitlines()
    except OSError:
        return 0.0
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = [cpu for line in lines if (cpu := line.split())[:1] and cpu[0] in ours]
    return sum(int(cpu[i]) for cpu in ticks for i in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")  # but 4, 5: idle


def _outstanding(out: Path, plan: dict[str, Any]) -> dict[tuple[str, str], int]:
    """World sizes of the unfinished runs and events, by name and what it is."""
    events = {(of["name"], "event"): of["world_size"] for of in plan["events"] if not _is_measured(out, of)}
    return {(of["name"], "run"): plans.ranks_needed(of) for of in plan["runs"] if not is_done(out, of["name"])} | events


def _is_measured(out: Path, event: dict[str, Any]) -> bool:
    return (out / "events" / f"{event['name']}.json").exists()


def _units(out: Path, plan: dict[str, Any]) -> tuple[int, int]:
    """Rounds and signatures, in units of progress: all of a plan, and those on disk."""
    total = done = 0
    for run in plan["runs"]:
        total += (rounds := run["rounds"]) * ROUND_UNITS
        finished = rounds if is_done(out, run["name"]) else min(rounds - 1, len(read_rounds(out, run)["rounds"]))
        done += finished * ROUND_UNITS
    for event in plan["events"]:
        total += (units := len(event.get("ops", ())) + len(event.get("collectives", ())))
        done += units * _is_measured(out, event)
    return total, done


def _run_world(out: Path, size: int, bar: Progress, boxed: bool) -> None:
    """Run one launch of this world size to its end; show its progress and log its other output."""
    doing, failure, log = f"start of {size} ranks", "", out / "logs" / f"world{size}.log"

    def told(facts: dict[str, Any]) -> None:
        nonlocal doing, failure
        if "refused" in facts:
            raise HarnessError(facts["refused"])
        failure = failure or facts.get("failed", "")
        if "doing" in facts:
            doing = facts["doing"]
            bar.update(doing, facts["done"])

    bar.update(f"starting {size} ranks")
    each = [{}] if boxed else places(size)  # a box is one process, which makes its ranks
    code, last = run_module("running.worker", [str(out / "plan.json"), "--out", str(out)], out, each, log, told)
    if code != 0:
        bar.close(f"failed in {doing}")
        why = " ".join(failure.split()) if code > 0 else ""  # the others only lost a killed one
        why = why or how_ended(code) + (f": {last}" if last and code > 0 else "")
        raise HarnessError(f"a worker of {size} ranks failed in {doing}: {why:.300}; see {log}")
