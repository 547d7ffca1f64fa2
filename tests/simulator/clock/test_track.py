import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.simulator.clock.track import Track, find_track, steady_state
from stepsight.simulator.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD
from stepsight.simulator.schedules.order import COMPUTE, FIRST, LAST, MIDDLE, POST

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("looped-bfs", 2), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2)]
RUNS = [(name, v, runtime) for name, v in SCHEDULES for runtime in ("asynchronous", "torch")]
RUNS.append(("1f1b", 1, "deepspeed"))  # which has no other schedule

tracks = st.builds(
    lambda run, stages, rounds: find_track(run[0], stages, stages * rounds, *run[1:]),
    st.sampled_from(RUNS),
    st.integers(2, 6),
    st.integers(1, 3),
)


def test_turns_of_a_stage() -> None:
    track = find_track("1f1b", 2, 3)
    for kind in (FORWARD, BACKWARD):
        own = track.kind == kind
        rows = zip(track.stage[own].tolist(), track.micro_batch[own].tolist(), track.turn[own].tolist(), strict=True)
        assert {(s, m): turn for s, m, turn in rows} == {
            (s, m): turn for s in range(2) for m, turn in enumerate((FIRST, MIDDLE, LAST))
        }


def test_a_single_micro_batch_is_the_last() -> None:
    assert set(find_track("gpipe", 2, 1).turn.tolist()) == {LAST}


def test_weight_gradients_have_their_turns_whole_or_split() -> None:
    """DualPipeV runs both kinds: a part's first and last weight gradient are marked once."""
    track = find_track("dualpipev", 4, 9, 2)
    weights = (track.kind == BACKWARD) | (track.kind == BACKWARD_WEIGHT)
    for part in range(8):
        turns = track.turn[weights & (track.part == part)].tolist()
        assert turns == [FIRST, *[MIDDLE] * 7, LAST]


@given(tracks)
def test_every_dependency_comes_first(track: Track) -> None:
    assert (track.source < track.target).all()
    assert (track.stage[track.source] != track.stage[track.target]).all()
    assert (track.micro_batch[track.source] == track.micro_batch[track.target]).all()
    assert (abs(track.part[track.source] - track.part[track.target]) == 1).all()
    for stage in range(track.num_stages):
        own = track.stage == stage
        rows = np.stack([track.kind[own], track.micro_batch[own]], axis=1)
        assert (rows == track.schedule.actions[stage][:, :2]).all()


@given(tracks)
def test_entries_can_run_in_their_order(track: Track) -> None:
    """Both sides post a message once before anyone waits for it, and results are sent after they are made."""
    posted: set[tuple[int, int]] = set()
    computed: set[int] = set()
    arrived: set[int] = set()
    receiver = {int(action): message for message, action in enumerate(track.target)}
    for op, stage, index, side in zip(*(field.tolist() for field in track.entries), strict=True):
        if op == COMPUTE:
            assert index not in computed and track.stage[index] == stage
            assert index not in receiver or receiver[index] in arrived
            computed.add(index)
        elif op == POST:
            assert (index, side) not in posted
            assert side == 1 or int(track.source[index]) in computed
            posted.add((index, side))
            assert track.stage[(track.source, track.target)[side][index]] == stage
        else:
            assert {(index, 0), (index, 1)} <= posted
            if side:
                arrived.add(index)
    assert len(computed) == track.num_actions
    assert len(posted) == 2 * track.num_messages


def test_unknown_runtimes_are_refused() -> None:
    with pytest.raises(JobError, match="runtime must be one of asynchronous, torch, deepspeed, got 'magic'"):
        find_track("1f1b", 2, 2, 1, "magic")


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "v", "runtime", "steady"),
    [
        # Of each micro-batch: 2 actions a stage, 6 messages between stages, each posted twice and waited for once.
        ("1f1b", 4, 64, 1, "asynchronous", (59, 8 + 6 * 3, 59, 1)),
        ("gpipe", 4, 64, 1, "asynchronous", (857, 8 + 6 * 3, 30, 1)),
        ("zb-h1", 4, 64, 1, "asynchronous", (103, 12 + 6 * 3, 58, 1)),
        ("zbv", 4, 64, 2, "asynchronous", (221, 24 + 12 * 3, 55, 1)),  # the way up and down turns within a stage
        ("1f1b", 4, 64, 2, "asynchronous", (285, 4 * (16 + 14 * 3), 13, 1)),  # 4 micro-batches in turn
        ("1f1b", 4, 64, 1, "torch", (73, 8 + 6 * 4, 59, 1)),  # which waits for its sends too
        ("1f1b", 2, 11, 1, "asynchronous", (14, 4 + 2 * 3, 8, 1)),
        ("1f1b", 2, 10, 1, "asynchronous", (0, 0, 0, 0)),  # less than 8 periods are not looked for
        ("1f1b", 1, 8, 1, "asynchronous", (0, 0, 0, 0)),
    ],
)
def test_what_repeats(
    name: str, stages: int, micro_batches: int, v: int, runtime: str, steady: tuple[int, int, int, int]
) -> None:
    """First entry, entries of a period, periods, and after how many periods the latest message is waited for."""
    assert tuple(steady_state(find_track(name, stages, micro_batches, v, runtime))) == steady


@pytest.mark.parametrize(("name", "v"), SCHEDULES)
@pytest.mark.parametrize("micro_batches", [8, 64])
def test_periods_are_alike(name: str, v: int, micro_batches: int) -> None:
    """An entry of a period does what the one a period later does, to a later micro-batch or message."""
    track = find_track(name, 4, micro_batches, v)
    first, length, periods, _ = steady_state(track)
    op, stage, item, side = (
        field[first : first + length * periods].reshape(periods, length) for field in track.entries
    )
    for field in (op, stage, side):
        assert (field == field[:1]).all()
    actions = np.where(op == COMPUTE, item, track.source[np.where(op == COMPUTE, 0, item)])
    assert (track.part[actions] == track.part[actions][:1]).all()
    assert (track.kind[actions] == track.kind[actions][:1]).all()
    assert (np.diff(track.micro_batch[actions], axis=0) > 0).all()
