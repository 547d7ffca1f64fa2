import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import Fabric, Hardware, Link
from stepsight.dataset.job.job import Job
from stepsight.simulator.durations.latency_model import RooflineLatency
from stepsight.simulator.iteration.simulate import Simulation, simulate
from stepsight.simulator.iteration.timeline import timeline, timeline_json
from tests.simulator.any_job import FABRIC, devices, jobs
from tests.simulator.conftest import JobMaker


@pytest.fixture
def simulation(make_job: JobMaker, gpu: Hardware) -> Simulation:
    job = make_job(pp=2, dp=2, tp=2, micro_batches=3, bucket_mbytes=0.05)
    return simulate(job, RooflineLatency(gpu, Fabric("toy", Link(1e10, 3e-6), Link(1e10, 3e-6))))


def events(simulation: Simulation, level: str) -> list[Any]:
    return json.loads(json.dumps(timeline(simulation, level), allow_nan=False))["traceEvents"]


def nanoseconds(value: str) -> int:
    """Microseconds with three digits, as written."""
    whole, _, part = value.partition(".")
    return int(whole) * 1000 + int(part)


def spans_of(simulation: Simulation, level: str, scale: float = 1.0) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Begin and end of the events of each track (process and thread), in whole nanoseconds."""
    rows = defaultdict(list)
    text = b"".join(timeline_json(simulation, level, scale))
    for event in json.loads(text, parse_float=str)["traceEvents"]:
        if event["ph"] == "X":
            begin = nanoseconds(event["ts"])
            rows[event["pid"], event["tid"]].append((begin, begin + nanoseconds(event["dur"])))
    return rows


def check_tracks(simulation: Simulation, level: str, scale: float = 1.0) -> None:
    """No stream does two things at once: viewers drop events that overlap by a nanosecond."""
    for spans in spans_of(simulation, level, scale).values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans)) and spans[0][0] >= 0
        assert spans[-1][1] <= simulation.iteration_time_s * scale * 1e9 + 1


@pytest.mark.parametrize("level", ["segment", "op"])
def test_no_stream_does_two_things_at_once(simulation: Simulation, level: str) -> None:
    assert len(spans_of(simulation, level)) >= 4
    for scale in (1.0, 0.7, 1.0 / 3):
        check_tracks(simulation, level, scale)


@settings(max_examples=15, deadline=None)
@given(jobs(), devices(), st.sampled_from(["segment", "op"]), st.floats(0.5, 2.0))
def test_tracks_of_any_job_never_overlap(job: Job, device: Hardware, level: str, scale: float) -> None:
    check_tracks(simulate(job, RooflineLatency(device, FABRIC)), level, scale)


@pytest.mark.parametrize("level", ["segment", "op"])
def test_ends_with_the_iteration(simulation: Simulation, level: str) -> None:
    end = max(event["ts"] + event["dur"] for event in events(simulation, level) if event["ph"] == "X")
    assert end == pytest.approx(simulation.iteration_time_s * 1e6)


def test_stages_and_streams_have_names(simulation: Simulation) -> None:
    names = {event["args"]["name"] for event in events(simulation, "op") if event["ph"] == "M"}
    assert names == {"stage 0", "stage 1", "compute", "tp", "dp", "pp F to stage 1", "pp B to stage 0"}


def test_every_action_is_there_once(simulation: Simulation) -> None:
    actions = [e["name"] for e in events(simulation, "segment") if e.get("cat") in ("forward", "backward", "optimizer")]
    assert sorted(actions) == sorted(["F0", "F1", "F2", "B0", "B1", "B2", "optimizer"] * 2)


def test_unknown_levels_are_refused(simulation: Simulation) -> None:
    with pytest.raises(StepsightError, match="level must be one of segment, op, got 'kernel'"):
        timeline(simulation, "kernel")


@pytest.mark.parametrize("strategy", [{"schedule": "zb-h1"}, {"zero_stage": 3, "reshard_after_forward": False}, {}])
def test_nothing_is_before_the_beginning(make_job: JobMaker, gpu: Hardware, strategy: dict[str, Any]) -> None:
    """Whatever a segment does beside its computation."""
    job = make_job(pp=2, dp=4, micro_batches=4, bucket_mbytes=0.01, **strategy)
    result = simulate(job, RooflineLatency(gpu, Fabric("toy", Link(1e8, 3e-6), Link(1e8, 3e-6))))
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events(result, "op") if e["ph"] == "X"]
    assert min(begin for begin, _ in spans) >= 0
    assert max(end for _, end in spans) <= result.iteration_time_s * 1e6 + 2e-3


def test_arrows_join_messages_with_the_actions_that_send_and_need_them(simulation: Simulation) -> None:
    """Each flow begins, passes and ends inside an event of its own track, in order of time, as viewers require."""
    found = events(simulation, "segment")
    spans = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    flows = defaultdict(list)
    for event in found:
        if event["ph"] in "stf":
            inside = [n for begin, end, n in spans[event["pid"], event["tid"]] if begin <= event["ts"] <= end]
            assert inside, event
            flows[event["id"]].append((event["ph"], event["ts"], inside[-1]))
    assert len(flows) == simulation.lowered.track.num_messages > 0
    for steps in flows.values():
        assert [phase for phase, _, _ in steps] == ["s", "t", "f"]
        assert [at for _, at, _ in steps] == sorted(at for _, at, _ in steps)
        assert "to stage" in steps[1][2]


@pytest.mark.parametrize("level", ["segment", "op"])
def test_counters_show_memory_and_messages(simulation: Simulation, level: str) -> None:
    """Memory reaches the stage's peak; as many messages begin as end."""
    counters = [event for event in events(simulation, level) if event["ph"] == "C"]
    for stage, memory in enumerate(simulation.memory.stages):
        mine = [event for event in counters if event["pid"] == stage]
        sizes = [event["args"]["value"] for event in mine if event["name"] == "memory (GB)"]
        assert max(sizes) == pytest.approx(memory.total / 1e9, rel=1e-4)
        sent = [event["args"]["value"] for event in mine if event["name"] == "messages in flight"]
        assert sent[-1] == 0 and min(sent) >= 0 and max(sent) >= 1
