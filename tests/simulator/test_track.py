from stepsight.simulator.schedules import BACKWARD
from stepsight.simulator.track import FIRST, LAST, MIDDLE, find_track


def test_the_first_and_last_backward_of_a_stage() -> None:
    track = find_track("1f1b", 2, 3)
    order = track.order
    rows = zip(order.stage, order.kind, order.micro_batch, track.turn, strict=True)
    turns = {(int(stage), int(micro)): int(turn) for stage, kind, micro, turn in rows if kind == BACKWARD}
    assert turns == {(s, m): turn for s in range(2) for m, turn in enumerate((FIRST, MIDDLE, LAST))}


def test_a_single_backward_is_the_last() -> None:
    track = find_track("gpipe", 2, 1)
    assert set(track.turn[track.order.kind == BACKWARD].tolist()) == {LAST}


def test_optimizers_come_last_on_every_stage() -> None:
    track = find_track("1f1b", 3, 4)
    assert track.stage[-3:].tolist() == [0, 1, 2]
    assert (track.source[-3:] == -1).all()
    for at in range(len(track.stage)):
        if track.previous[at] >= 0:
            assert track.stage[track.previous[at]] == track.stage[at]
    assert track.order.kind[track.previous[-1]] == BACKWARD
