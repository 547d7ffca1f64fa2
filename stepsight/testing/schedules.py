"""The contract of pipeline schedules: what the simulator, the memory estimate and the runtimes rely on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule, ScheduleKind
from stepsight.simulator.clock.track import run_track, track

SIZES = ((2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (4, 13), (8, 32))


class ScheduleContract:
    """Tests that every kind of schedule passes: the one that the fixture ``kind`` returns.

    Attributes:
        sizes: Numbers of stages and micro-batches that are tried; those that the schedule refuses are left out.
    """

    sizes = SIZES

    def most_in_flight(self, num_stages: int, num_micro_batches: int, virtual_stages: int) -> int:
        """The most chunks that a stage may have forwarded without their weight gradients: all of them by default.

        Override it with the bound that is published for your schedule.
        """
        return num_micro_batches * virtual_stages

    def test_makes_what_is_asked_for(self, kind: ScheduleKind) -> None:
        """Some size works; the schedule has the requested numbers, and depends on them alone."""
        assert kind.doc, "make needs a docstring, or the kind a doc"
        for size, schedule in self._made(kind):
            assert (schedule.num_stages, schedule.num_micro_batches, schedule.virtual_stages) == size
            assert schedule.name == "contract"
            again = kind.build("contract", *size)
            assert all(map(np.array_equal, schedule.actions, again.actions))
            assert np.array_equal(schedule.placement, again.placement)

    def test_refuses_in_one_line(self, kind: ScheduleKind) -> None:
        """Numbers that are not allowed raise a JobError with the values."""
        fewest, most = kind.virtual_stages
        for wrong in (fewest - 1, most + 1):
            with pytest.raises(JobError, match=f"has virtual_stages .*, got {wrong}"):
                kind.build("contract", 2, 4, wrong)
        for size in self.sizes:
            try:
                kind.build("contract", *size, fewest)
            except JobError as error:
                assert "\n" not in str(error) and ", got " in str(error)

    def test_places_every_part_once(self, kind: ScheduleKind) -> None:
        """Every stage and chunk holds one part of the model."""
        for (num_stages, _, virtual_stages), schedule in self._made(kind):
            places = sorted((stage, chunk) for stage, chunk in schedule.placement.tolist())
            assert places == list(product(range(num_stages), range(virtual_stages)))

    def test_runs_every_action_once(self, kind: ScheduleKind) -> None:
        """Every part runs each micro-batch forward once, and backward once: whole, or in two halves."""
        for (_, num_micro_batches, virtual_stages), schedule in self._made(kind):
            for rows in schedule.actions:
                assert rows.dtype == np.int32 and rows.ndim == 2 and rows.shape[1] == 3
                counts = np.zeros((4, num_micro_batches, virtual_stages), dtype=np.int64)
                np.add.at(counts, tuple(rows.T), 1)
                assert (counts[FORWARD] == 1).all() and (counts[BACKWARD] + counts[BACKWARD_INPUT] == 1).all()
                assert (counts[BACKWARD_WEIGHT] == counts[BACKWARD_INPUT]).all()

    def test_runs_after_what_it_needs(self, kind: ScheduleKind) -> None:
        """On each stage a backward follows its forward, and a weight gradient its input gradient."""
        for (_, num_micro_batches, virtual_stages), schedule in self._made(kind):
            for rows in schedule.actions:
                place = np.full((4, num_micro_batches, virtual_stages), -1)
                place[tuple(rows.T)] = np.arange(len(rows))
                assert (np.maximum(place[BACKWARD], place[BACKWARD_INPUT]) > place[FORWARD]).all()
                split = place[BACKWARD_WEIGHT] >= 0
                assert (place[BACKWARD_WEIGHT][split] > place[BACKWARD_INPUT][split]).all()

    def test_no_stage_waits_in_a_circle(self, kind: ScheduleKind) -> None:
        """All actions run: each after those of other stages that it needs, and those of a stage in their order."""
        for size, schedule in self._made(kind):
            on = track(schedule)
            assert on.num_actions == sum(map(len, schedule.actions)) and (on.source < on.target).all()
            assert (abs(on.part[on.source] - on.part[on.target]) == 1).all()
            assert (on.micro_batch[on.source] == on.micro_batch[on.target]).all()
            assert on.num_messages == 2 * size[1] * int((np.diff(schedule.placement[:, 0]) != 0).sum())
            for stage, rows in enumerate(schedule.actions):
                own = on.stage == stage
                assert (np.stack([on.kind[own], on.micro_batch[own]], axis=1) == rows[:, :2]).all()

    def test_takes_no_less_than_its_work(self, kind: ScheduleKind) -> None:
        """An iteration takes at least a stage's work and a micro-batch's path, at most all work in sequence."""
        for (num_stages, num_micro_batches, v), schedule in self._made(kind):
            on, seconds = track(schedule), np.array([1.0, 2.0, 1.0, 1.0]).reshape(4, 1, 1)
            end = run_track(on, on.kind, seconds, np.zeros(on.num_messages)).clocks.max()
            work = 3 * v * num_micro_batches
            assert max(work, 2 * num_stages * v) <= end <= work * num_stages

    def test_keeps_a_bounded_number_in_flight(self, kind: ScheduleKind) -> None:
        """No stage keeps more activations than ``most_in_flight``, and none keeps any at the end."""
        for size, schedule in self._made(kind):
            for stage, rows in enumerate(schedule.actions):
                held = np.select([rows[:, 0] == FORWARD, rows[:, 0] == BACKWARD_INPUT], [1, 0], -1).cumsum()
                fits = 0 < held.max() <= self.most_in_flight(*size) and held[-1] == 0
                assert fits, f"stage {stage} of {size}: {held.max()} in flight, {held[-1]} at the end"

    def test_marks_whole_pairs_as_fused(self, kind: ScheduleKind) -> None:
        """Fused actions are a forward and the whole backward after it."""
        for _, schedule in self._made(kind):
            assert len(schedule.fused) in (0, schedule.num_stages)
            for rows, fused in zip(schedule.actions, schedule.fused, strict=False):
                at = np.flatnonzero(fused)
                assert fused.shape == (len(rows),)
                assert (rows[at, 0] == FORWARD).all() and (rows[at + 1, 0] == BACKWARD).all()

    def _made(self, kind: ScheduleKind) -> Iterator[tuple[tuple[int, int, int], Schedule]]:
        """Sizes that the schedule allows, with the schedules; at least one."""
        fewest, most = kind.virtual_stages
        count = 0
        for virtual_stages in sorted({min(fewest + more, most) for more in range(3)}):
            for size in self.sizes:
                try:
                    schedule = kind.build("contract", *size, virtual_stages)
                except JobError:
                    continue
                count += 1
                yield (*size, virtual_stages), schedule
        assert count, f"no size of {self.sizes} is allowed"
