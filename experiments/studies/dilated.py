"""Dilated pipelines: real ``torch.distributed.pipelining`` on ranks that sleep, against the simulator.

``stepsight experiment dilated`` runs every schedule on 4, 8 and 16 processes over gloo, fits the constants of the
runtime on the 4, and compares all makespans and starts of actions with the simulator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.errors import CollectError, StepsightError
from stepsight.dataset.base.files import write_json
from stepsight.experiments.reports.text_table import Number, table
from stepsight.simulator.clock.track import Track, find_track
from stepsight.simulator.schedules import write_schedule
from stepsight.training.measured.runtime_costs import RuntimeCosts, fit_costs, measured, simulate_case

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("1f1b", 2),
    ("looped-bfs", 2),
    ("interleaved-zb", 2),
    ("zbv", 2),
    ("dualpipev", 2),
)
RANKS = (4, 8, 16)
FIT_RANKS = 4
REPEATS = 3
MICRO_BATCHES_PER_RANK = 2
FORWARD_S, INPUT_S, WEIGHT_S = 0.05, 0.06, 0.05
UNEVEN = 8  # ranks of the cases in which every other rank is slower
PACE = 1.3


def dilated_cases() -> list[dict[str, Any]]:
    """Every case that there is, the smallest first."""
    cases = []
    for ranks in RANKS:
        for uneven in (False, True) if ranks == UNEVEN else (False,):
            for schedule, v in SCHEDULES:
                words = [schedule, f"v{v}" if v > 1 else "", "uneven" if uneven else "", f"r{ranks}"]
                cases.append(
                    {
                        "name": "-".join(word for word in words if word),
                        "schedule": schedule,
                        "virtual_stages": v,
                        "micro_batches": MICRO_BATCHES_PER_RANK * ranks,
                        "forward_s": FORWARD_S,
                        "input_s": INPUT_S,
                        "weight_s": WEIGHT_S,
                        "pace": [PACE if uneven and rank % 2 else 1.0 for rank in range(ranks)],
                    }
                )
    return cases


def run_cases(cases: Sequence[dict[str, Any]], out: Path, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """Records of the cases, from ``out`` if they are there, else from real runs.

    Raises:
        CollectError: If a run failed; the message names its log.
    """
    records = {case["name"]: _read(out, case) for case in cases}
    for ranks in sorted({len(case["pace"]) for case in cases}):
        todo = [case for case in cases if len(case["pace"]) == ranks and records[case["name"]] is None]
        if todo:
            _run(todo, ranks, out, repeats)
            records |= {case["name"]: _read(out, case) for case in todo}
    return [record for record in records.values() if record is not None]


def _read(out: Path, case: dict[str, Any]) -> dict[str, Any] | None:
    path = out / f"{case['name']}.json"
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    kept = {key: value for key, value in record["case"].items() if key != "csv"}
    if kept != case:
        raise CollectError(
            f"a folder holds one kind of runs: {path} is of {kept}, not of {case}; choose another folder"
        )
    return record


def _run(cases: Sequence[dict[str, Any]], ranks: int, out: Path, repeats: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    own = []
    for case in cases:
        own.append(dict(case))
        if case["schedule"] == "zb-h1":  # torch has no class for it
            own[-1]["csv"] = str(out / f"{case['name']}.csv")
            write_schedule(_find(case).schedule, own[-1]["csv"])
    plan, log = out / f"plan-{ranks}.json", out / f"log-{ranks}.txt"
    write_json(plan, {"ranks": ranks, "repeats": repeats, "out": str(out), "cases": own})
    command = [sys.executable, "-m", "stepsight.dataset.harness.box.dilated_pipeline", str(plan)]
    print(f"dilated: {ranks} ranks, {len(cases)} cases", file=sys.stderr, flush=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(f"dilated: {line}", end="", file=sys.stderr, flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
    if process.returncode:
        raise CollectError(
            f"{ranks} ranks must run every case to its end, got exit code {process.returncode}; see {log}"
        )


def _find(case: dict[str, Any], runtime: str = "torch") -> Track:
    return find_track(
        case["schedule"], len(case["pace"]), case["micro_batches"], case["virtual_stages"], runtime=runtime
    )


def compare_makespans(record: dict[str, Any], costs: RuntimeCosts) -> dict[str, Any]:
    """Measured and predicted makespan, and errors of the starts of actions, in per cent of the measured makespan.

    ``ideal`` is a simulator without the runtime: no costs, no blocking, and a first stage like the others.
    """
    case = record["case"]
    track = _find(case)
    run = simulate_case(case, track, costs)
    predicted = run.start[:, 0] - run.start[:, 0].min()
    ideal = simulate_case(case, _find(case, "asynchronous"), RuntimeCosts(), first_alike=True)
    spans, errors = [], []
    for step in record["steps"]:
        start, end = measured(step, track)
        spans.append(end.max())
        errors.append(100 * np.abs(predicted - start) / end.max())
    span = float(np.median(spans))
    length = float(run.finish.max() - run.start.min())
    return {
        "name": case["name"],
        "ranks": record["ranks"],
        "fitted": record["ranks"] == FIT_RANKS,
        "measured_s": span,
        "spread_percent": 100 * float(max(spans) - min(spans)) / span,
        "predicted_s": length,
        "error_percent": 100 * (length / span - 1),
        "mean_start_percent": float(np.mean(errors)),
        "worst_start_percent": float(np.max(errors)),
        "ideal_percent": 100 * (float(ideal.finish.max()) / span - 1),
    }


def report(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fitted constants and one row per case.

    Raises:
        CollectError: If there is no case to fit on.
    """
    small = [record for record in records if record["ranks"] == FIT_RANKS]
    if not small:
        raise CollectError(f"constants are fitted on {FIT_RANKS} ranks: --only must match one of their cases")
    costs = fit_costs([(record["case"], _find(record["case"]), step) for record in small for step in record["steps"]])
    return {"costs": asdict(costs), "cases": [compare_makespans(record, costs) for record in records]}


def dilated_text(figures: dict[str, Any]) -> str:
    """The report as text."""
    header = ["case", "measured s", "spread %", "predicted s", "error %", "start: mean %", "worst %", "ideal %"]
    keys = ["measured_s", "spread_percent", "predicted_s", "error_percent"]
    keys += ["mean_start_percent", "worst_start_percent", "ideal_percent"]
    rows = [
        [row["name"], *(Number(row[key], 3 if key.endswith("_s") else 2) for key in keys)] for row in figures["cases"]
    ]
    constants = ", ".join(f"{name.removesuffix('_s')} {1e3 * value:.2f} ms" for name, value in figures["costs"].items())
    return f"{table(header, rows)}\nfitted on {FIT_RANKS} ranks: {constants}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stepsight experiment dilated", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/dilated"), help="folder of the records; resumed")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of the cases to run")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args(arguments)
    cases = [case for case in dilated_cases() if fnmatch(case["name"], options.only)]
    if options.list:
        print("\n".join(case["name"] for case in cases))
        return 0
    try:
        figures = report(run_cases(cases, options.out.resolve()))
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures) if options.json else dilated_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
