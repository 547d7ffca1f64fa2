"""Micro-batches in flight, counted from schedules' own actions."""

import numpy as np
import pytest

from stepsight.simulator.memory.peaks import ACTION, ACTIVATIONS, FLYING, GRADIENTS, MOMENT, find_peaks
from stepsight.simulator.schedules import Schedule, find_schedule


def peaks(
    schedule: Schedule, *, kept: float = 1, deferred: float = 0, grown: float = 0, backward: float = 1
) -> np.ndarray:
    sizes = np.zeros((schedule.num_stages, schedule.virtual_stages, 9))
    sizes[:] = (kept, 0, deferred, grown, kept, backward, backward, 0, deferred)
    return find_peaks(schedule, sizes)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "flying"),
    [
        ("1f1b", 4, 8, [4, 3, 2, 1]),
        ("1f1b", 4, 2, [2, 2, 2, 1]),
        ("gpipe", 4, 8, [8, 8, 8, 8]),
        ("1f1b", 1, 8, [1]),
        ("zb-h1", 4, 8, [4, 4, 4, 4]),
    ],
)
def test_in_flight(name: str, stages: int, micro_batches: int, flying: list[int]) -> None:
    """1F1B: as many as stages are left.  Zero-bubble H1: as many as 1F1B's first stage, some of them half done."""
    found = peaks(find_schedule(name, stages, micro_batches), deferred=1)
    assert found[:, ACTIVATIONS].tolist() == flying


@pytest.mark.parametrize(("stages", "virtual_stages"), [(4, 2), (8, 3)])
def test_in_flight_interleaved(stages: int, virtual_stages: int) -> None:
    """Narayanan et al. 2021: chunks of ``2 (p - rank - 1) + (v - 1) p`` micro-batches warm up, and one more runs."""
    found = peaks(find_schedule("1f1b", stages, 8 * stages, virtual_stages))
    ahead = stages - 1 - np.arange(stages)
    np.testing.assert_array_equal(found[:, FLYING], 2 * ahead + (virtual_stages - 1) * stages + 1)


def test_every_chunk_counts_for_itself() -> None:
    """Chunks of very different sizes: their micro-batches are counted apart."""
    schedule = find_schedule("1f1b", 2, 8, 2)
    sizes = np.zeros((2, 2, 9))
    sizes[:, :, 0] = sizes[:, :, 4] = sizes[:, :, 5] = sizes[:, :, 6] = (1, 100)
    found = find_peaks(schedule, sizes)
    assert found[:, FLYING].tolist() == [5, 3]
    assert found[:, ACTIVATIONS].tolist() == [203, 102]


def test_gradients_come_with_the_first_backward() -> None:
    """A second micro-batch finds them there: 1 kept and 5 of gradients, against 1 and its own 2 in the first."""
    (found,) = peaks(find_schedule("1f1b", 1, 2), grown=5, backward=3)
    assert found[[MOMENT, GRADIENTS, ACTION]].tolist() == [8, 5, 1]


def test_what_is_deferred_waits_for_its_own_action() -> None:
    """With all of it deferred, nothing is gained by splitting; with none, as much as by running at once."""
    split = find_schedule("zb-h1", 4, 8)
    whole = find_schedule("1f1b", 4, 8)
    np.testing.assert_array_equal(peaks(split, deferred=0)[:, MOMENT], peaks(whole)[:, MOMENT])
    assert (peaks(split, deferred=1)[1:, MOMENT] > peaks(whole)[1:, MOMENT]).all()


def test_gathered_parameters_stay_from_the_first_forward_on() -> None:
    """The peaks of a chunk hold its own; those of the others come on top, once they have run."""
    schedule = find_schedule("1f1b", 2, 4, 2)
    sizes = np.zeros((2, 2, 9))
    sizes[:, :, 7] = sizes[:, :, 4] = sizes[:, :, 5] = sizes[:, :, 6] = (10, 100)
    assert find_peaks(schedule, sizes)[:, MOMENT].tolist() == [110, 110]
    sizes[:, 1, 7] = 0
    assert find_peaks(schedule, sizes)[:, MOMENT].tolist() == [110, 110]
    sizes[:, 0, 7] = 0
    assert find_peaks(schedule, sizes)[:, MOMENT].tolist() == [100, 100]


# Sizes of one chunk, all different, so that any other sum is another number.
SIZES = {
    "kept": 1000, "left": 100, "deferred": 600, "grown": 50, "forward": 2000, "backward": 3000, "backward_first": 3500,
    "gathered": 7, "weight": 900,
}  # fmt: skip


def one_stage(*actions: tuple[int, int], **sizes: float) -> list[float]:
    """The peak of a stage of one chunk that runs ``(kind, micro-batch)`` in turn."""
    rows = np.array([(kind, micro, 0) for kind, micro in actions], dtype=np.int32)
    schedule = Schedule((rows,), 1 + int(rows[:, 1].max()), np.zeros((1, 2), dtype=np.int32))
    values = {**SIZES, **sizes}
    assert list(values) == list(SIZES)
    return find_peaks(schedule, np.array([[list(values.values())]], dtype=np.float64))[0].tolist()


@pytest.mark.parametrize(
    ("actions", "sizes", "moment", "there", "grown", "flying", "kind"),
    [
        # The second forward: the first one's activations and what it left stay.
        ([(0, 0), (0, 1)], {}, 1100 + 2000, 2200, 0, 2, 0),
        # The first backward needs more than later ones; what forward left stays after it.
        ([(0, 0), (1, 0)], {}, 100 + 3500, 1100, 0, 1, 1),
        # The second backward: the first one's gradients have grown.
        ([(0, 0), (1, 0), (0, 1), (1, 1)], {"backward": 9000}, 200 + 9000 + 50, 1200, 50, 1, 1),
        # Gradients of parameters: what was deferred goes, the first time they grow.
        ([(0, 0), (2, 0), (3, 0)], {"weight": 9000}, 100 + 9000 + 50, 700, 0, 1, 3),
        ([(0, 0), (2, 0), (3, 0), (0, 1), (2, 1), (3, 1)], {"weight": 9000}, 200 + 9000 + 50, 800, 50, 1, 3),
        # A split backward never pays for what grows: that comes with the parameters' gradients.
        ([(0, 0), (2, 0)], {"backward_first": 99999}, 100 + 3000, 1100, 0, 1, 2),
        # What a split backward defers may be more than its own peak.
        ([(0, 0), (2, 0)], {"deferred": 5000}, 100 + 5000, 5100, 0, 1, 2),
    ],
)
def test_moments_by_hand(
    actions: list[tuple[int, int]],
    sizes: dict[str, float],
    moment: float,
    there: float,
    grown: float,
    flying: int,
    kind: int,
) -> None:
    """Gathered parameters are part of a chunk's own peaks, but of those of what is deferred and of weights."""
    more = 7 if kind == 3 or sizes.get("deferred") else 0
    assert one_stage(*actions, **{**sizes, "gathered": 0}) == [moment, there, grown, flying, kind]
    assert one_stage(*actions, **sizes)[0] == moment + more


def test_another_chunks_gathered_parameters_stay() -> None:
    """Each chunk's come with its first forward and are there while the other runs."""
    rows = np.array([(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 0, 0)], dtype=np.int32)
    schedule = Schedule((rows,), 1, np.array([[0, 0], [0, 1]], dtype=np.int32))
    sizes = np.zeros((1, 2, 9))
    sizes[0, :, 4] = 10.0, 100.0
    sizes[0, :, 7] = 3.0, 20.0
    assert find_peaks(schedule, sizes)[0, MOMENT] == 100.0 + 3.0
