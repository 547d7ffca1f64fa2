import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.simulator.clock.engine import Floats, Ints
from stepsight.simulator.clock.track import (
    Track,
    find_track,
    path_uses,
    run_entries,
    run_periods,
    run_track,
    trace_path,
    track_clocks,
)
from stepsight.simulator.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("looped-bfs", 2), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2)]
RUNS = [(name, v, runtime) for name, v in SCHEDULES for runtime in ("asynchronous", "torch")]
RUNS.append(("1f1b", 1, "deepspeed"))  # which has no other schedule


def plain(track: Track, seconds: dict[int, float]) -> tuple[Ints, Floats]:
    """Segments by kind, on one clock."""
    return track.kind, np.array([seconds.get(kind, 0.0) for kind in range(4)]).reshape(4, 1, 1)


@pytest.mark.parametrize(
    ("name", "v", "runtime"),
    [run for run in RUNS if run[0] in ("gpipe", "1f1b", "looped-bfs")] + [("1f1b", 3, "torch")],
)
def test_bubbles_of_the_closed_form(name: str, v: int, runtime: str) -> None:
    """Narayanan et al. 2021: (p - 1) / v forwards and backwards of a whole stage."""
    pp, micro_batches = 4, 12
    track = find_track(name, pp, micro_batches, v, runtime)
    run = run_track(track, *plain(track, {0: 1.0 / v, 1: 2.0 / v}), np.zeros(track.num_messages))
    assert run.clocks.max() == pytest.approx(3 * micro_batches + 3 * (pp - 1) / v)


@pytest.mark.parametrize(("name", "v", "bubble"), [("zb-h1", 1, 3.0), ("zbv", 2, 0.0)])
def test_zero_bubble_schedules_as_published(name: str, v: int, bubble: float) -> None:
    """Qi et al. 2023: H1 idles (p - 1) (F + B - W); ZBV does not, once it is filled."""
    track = find_track(name, 4, 12, v)
    kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    run = run_track(track, *plain(track, dict.fromkeys(kinds, 1.0 / v)), np.zeros(track.num_messages))
    work = [track.schedule.actions[stage].shape[0] / v for stage in range(4)]
    first = [float(run.log.start[track.stage == stage].min()) for stage in range(4)]
    idle = [float(run.clocks[stage, 0]) - first[stage] - work[stage] for stage in range(4)]
    assert max(idle) == pytest.approx(bubble)


def test_a_message_passes_when_both_sides_are_ready() -> None:
    """Two stages, one micro-batch: forward, message, forward and backward, message, backward."""
    track = find_track("gpipe", 2, 1)
    run = run_track(track, *plain(track, {0: 1.0, 1: 2.0}), np.full(2, 0.25), (0.01, 0.002))
    asked, sent = 0.002, 1.01 + 0.002
    assert run.posted[0].tolist() == pytest.approx([sent, asked])
    assert run.log.message_start[0] == pytest.approx(sent)
    assert run.log.message_finish[0] == pytest.approx(sent + 0.25)
    assert run.clocks[:, 0].tolist() == pytest.approx([6.5 + 4 * 0.01 + 2 * 0.002, 4.25 + 3 * 0.01 + 2 * 0.002])


@pytest.mark.parametrize(("name", "v"), [("1f1b", 2), ("interleaved-zb", 2), ("zbv", 2)])
def test_messages_asked_for_early_pass_while_a_rank_computes(name: str, v: int) -> None:
    """Torch's lowered schedules post their receives ahead, so messages cost less than where a rank asks and waits."""
    ends = []
    for runtime in ("asynchronous", "torch"):
        track = find_track(name, 4, 8, v, runtime)
        seconds = plain(track, {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0})
        ends.append(float(run_track(track, *seconds, np.full(track.num_messages, 0.2)).clocks.max()))
    assert ends[1] < ends[0]


@pytest.mark.parametrize(("stages", "messages"), [(2, 2), (3, 4), (6, 4)])
def test_messages_one_by_one_are_paid_for_one_by_one(stages: int, messages: int) -> None:
    """Under DeepSpeed a stage between two others sends two and receives two for every micro-batch, beside nothing."""

    def end(micro_batches: int) -> float:
        track = find_track("1f1b", stages, micro_batches, 1, "deepspeed")
        seconds = plain(track, {0: 1.0, 1: 2.0})
        return float(run_track(track, *seconds, np.full(track.num_messages, 0.1)).clocks.max())

    assert (end(30) - end(20)) / 10 == pytest.approx(3.0 + 0.1 * messages)


def test_torchs_gpipe_waits_for_its_receivers_at_the_end_of_a_pass() -> None:
    track = find_track("gpipe", 2, 4, 1, "torch")
    segment = (track.stage * 2 + track.kind).astype(np.int32)
    transition = np.array([1.0, 0.1, 3.0, 0.1]).reshape(4, 1, 1)
    run = run_track(track, segment, transition, np.zeros(track.num_messages))
    forward = track.kind[track.source] == FORWARD
    assert run.log.held[forward, 0].tolist() == [False, False, True, True]
    assert run.log.message_start[forward].tolist() == [1.0, 4.0, 7.0, 10.0]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Track, Ints, Floats, Floats, float, float]:
    name, v, runtime = draw(st.sampled_from(RUNS))
    stages = draw(st.integers(2, 5))
    track = find_track(name, stages, stages * draw(st.integers(1, 3)), v, runtime)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    clocks, num_segments = draw(st.integers(1, 3)), 4
    segment = random.integers(0, num_segments, track.num_actions).astype(np.int32)
    transition = random.uniform(0, 2, (num_segments, clocks, clocks))
    none = random.random(transition.shape) < 0.4
    none[:, range(clocks), range(clocks)] = False
    transition[none] = -np.inf
    message_seconds = random.uniform(0, draw(st.sampled_from([0.0, 0.1, 3.0])), track.num_messages)
    host = draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0, 0.02]))
    return track, segment, transition, message_seconds, host


@given(runs())
def test_the_walk_adds_up(case: tuple[Track, Ints, Floats, Floats, tuple[float, float]]) -> None:
    """Every clock is the sum of what lies on its critical path."""
    track, _, transition, message_seconds, host = case
    run = run_track(*case)
    for stage in range(track.num_stages):
        for clock in range(transition.shape[1]):
            uses, message_uses, actions, messages = path_uses(run, stage, clock)
            total = (uses[uses > 0] * transition[uses > 0]).sum() + message_uses @ message_seconds
            total += actions * host[0] + messages * host[1]
            assert total == pytest.approx(float(run.clocks[stage, clock]), rel=1e-9)


@given(runs())
def test_every_wait_is_kept(case: tuple[Track, Ints, Floats, Floats, tuple[float, float]]) -> None:
    """No action starts before its message is there, and a stage's actions do not overlap."""
    track, run = case[0], run_track(*case)
    assert (run.log.start[track.target, 0] >= run.log.message_finish).all()
    assert (run.log.message_start == run.posted.max(axis=1)).all()
    assert (run.posted[:, 0] >= run.log.finish[track.source, 0]).all()
    for stage in range(track.num_stages):
        own = track.stage == stage
        assert (run.log.start[own, 0][1:] >= run.log.finish[own, 0][:-1]).all()


def test_compiled_and_interpreted_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops give the same as plain Python and as machine code."""
    track = find_track("interleaved-zb", 3, 36, 2, "torch")
    given = (track, *plain(track, {0: 1.0, 2: 1.1, 3: 0.7}), np.full(track.num_messages, 0.1), (0.01, 0.001))
    results = []
    for native in (False, True):
        for loop in (run_entries, run_periods, trace_path):
            monkeypatch.setattr(loop, "_native", loop.compile() if native else loop.function)
        run = run_track(*given)
        arrays = [run.clocks, run.posted, *run.log, track_clocks(*given), *map(np.array, path_uses(run, 0))]
        results.append(np.concatenate([array.ravel() for array in arrays]))
    assert (results[0] == results[1]).all()
