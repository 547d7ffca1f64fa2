"""Kernels by name and launches agree with a plain computation on the events of the trace."""

import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.simulator.replay.step_timeline import kernel_table, launch_table, launch_times
from tests.dataset.traced_jobs import two_ranks

TRACES = Path(__file__).parents[3].parent / "shared/data/traces"
REPORT = TRACES / "tracelens/h100/gaunernst_bert-small-uncased__1016001_perf_report_csvs/kernel_summary.csv"


def frame(path: Path) -> pd.DataFrame:
    """Complete events of a trace in microseconds."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    found = pd.DataFrame([{**event, "correlation": event.get("args", {}).get("correlation")} for event in events])
    return found.astype({"ts": float, "dur": float})


def check_launches(events: pd.DataFrame, path: Path) -> None:
    (graph,) = import_ranks([path]).graphs
    kernels = events[events.cat.isin(["kernel", "gpu_memcpy", "gpu_memset"])]
    calls = events[events.cat.isin(["cuda_runtime", "cuda_driver"]) & events.name.str.contains("Launch|Mem")]
    both = kernels.merge(calls, on="correlation", suffixes=("", "_host"))
    delays = (both.ts - both.ts_host).to_numpy() * 1e-6
    (told,) = launch_table([graph])
    assert told["launches"] == len(delays)
    assert [told["mean_delay_s"], told["median_delay_s"], told["max_delay_s"]] == pytest.approx(
        [delays.mean(), np.median(delays), delays.max()], rel=1e-3, abs=2e-9
    )
    queue = pd.concat([pd.Series(1, both.ts_host), pd.Series(-1, both.ts)]).sort_index(kind="stable").cumsum()
    assert abs(told["max_queue"] - queue.max()) <= 1  # a launch at the very moment of a start
    launched, started = launch_times(graph)
    assert told["mean_queue"] * (started.max() - launched.min()) == pytest.approx(delays.sum(), rel=1e-3)


def test_kernels_and_launches_of_two_ranks(tmp_path: Path) -> None:
    paths = [file.write(tmp_path / f"{rank}.json") for rank, file in enumerate(two_ranks())]
    every = pd.concat([frame(path) for path in paths])
    want = every[every.cat == "kernel"].groupby("name").dur.agg(["count", "sum", "mean", "min", "max"])
    table = kernel_table(import_ranks(paths).graphs)
    assert [row["name"] for row in table if row["kind"] == "all_reduce"] == [
        name for name in want.index if "AllReduce" in name
    ]
    ours = pd.DataFrame(table).groupby("name").agg({"count": "sum", "seconds": "sum", "min_s": "min", "max_s": "max"})
    assert ours["count"].to_dict() == want["count"].to_dict()
    assert ours.seconds.to_dict() == pytest.approx((want["sum"] * 1e-6).to_dict(), abs=1e-9)
    assert ours.min_s.to_dict() == pytest.approx((want["min"] * 1e-6).to_dict(), abs=1e-9)
    assert ours.max_s.to_dict() == pytest.approx((want["max"] * 1e-6).to_dict(), abs=1e-9)
    assert sum(row["percent"] for row in table) == pytest.approx(100)
    assert [row["seconds"] for row in table] == sorted((row["seconds"] for row in table), reverse=True)
    check_launches(frame(paths[1]), paths[1])


@pytest.mark.skipif(not REPORT.is_file(), reason=f"needs the public traces in {TRACES}")
def test_a_public_trace_agrees_with_the_report_of_tracelens() -> None:
    path = REPORT.parents[1] / f"{REPORT.parent.name.removesuffix('_perf_report_csvs')}.json.gz"
    theirs = (
        pd.read_csv(REPORT).groupby("Kernel name")[["Kernel duration (µs)_sum", "Kernel duration (µs)_count"]].sum()
    )
    ours = pd.DataFrame(kernel_table(import_ranks([path]).graphs)).groupby("name")[["seconds", "count"]].sum()
    for name, (microseconds, count) in theirs.iterrows():
        assert ours.loc[name, "seconds"] == pytest.approx(1e-6 * microseconds, abs=2e-9)
        assert ours.loc[name, "count"] == count
    check_launches(frame(path), path)
