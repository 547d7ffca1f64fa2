import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.errors import JobError
from stepsight.simulator.clock.track import FIRST, LAST, MIDDLE, Track, find_track
from stepsight.simulator.runtimes.entries import COMPUTE, POST
from stepsight.simulator.schedules import BACKWARD, BACKWARD_WEIGHT, FORWARD

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
