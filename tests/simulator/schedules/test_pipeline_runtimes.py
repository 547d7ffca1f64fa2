"""What ranks do under torch's runtime, entry by entry, against the code of torch itself, without any process."""

from typing import Any

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.simulator.clock.track import Track, find_track, track
from stepsight.simulator.schedules import BACKWARD, FORWARD, KIND_NAMES, Schedule, find_schedule, v_placement
from stepsight.simulator.schedules.order import COMPUTE, POST, WAIT

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


class Recorder:
    """Stands for a stage, its messages and its works, and writes down what is asked of them."""

    def __init__(self, rows: list[str], part: int, parts: int) -> None:
        self.rows, self.stage_index, self.parts = rows, part, parts
        self.is_first, self.is_last = part == 0, part == parts - 1
        self.submod, self.output_chunks = None, []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def forward_one_chunk(self, micro: int, *args: Any, **kwargs: Any) -> None:
        self.rows.append(f"compute {self.stage_index}F{micro}")

    def backward_one_chunk(self, micro: int, full_backward: bool = True, **kwargs: Any) -> None:
        self.rows.append(f"compute {self.stage_index}{'B' if full_backward else 'I'}{micro}")

    def backward_weight_one_chunk(self, micro: int, **kwargs: Any) -> None:
        self.rows.append(f"compute {self.stage_index}W{micro}")

    def get_fwd_recv_ops(self, micro: int) -> list[str]:
        return [] if self.is_first else [f"receive {self.stage_index - 1}F{micro}"]

    def get_fwd_send_ops(self, micro: int) -> list[str]:
        return [] if self.is_last else [f"send {self.stage_index}F{micro}"]

    def get_bwd_recv_ops(self, micro: int) -> list[str]:
        return [] if self.is_last else [f"receive {self.stage_index + 1}G{micro}"]

    def get_bwd_send_ops(self, micro: int) -> list[str]:
        return [] if self.is_first else [f"send {self.stage_index}G{micro}"]


def torch_rows(monkeypatch: pytest.MonkeyPatch, schedule: Schedule, rank: int, single: str = "") -> list[str]:
    """What torch's loop does on a rank."""
    rows: list[str] = []
    parts = np.flatnonzero(schedule.placement[:, 0] == rank).tolist()
    stages = [Recorder(rows, part, schedule.num_parts) for part in parts]

    def post(ops: list[str], desc: str = "") -> list[str]:
        rows.extend("post " + op for op in ops)
        return ops

    monkeypatch.setattr(schedules, "_batch_p2p", post)
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", lambda ops, desc="": {0: post(ops)} if ops else {})
    monkeypatch.setattr(schedules, "_wait_batch_p2p", lambda works: rows.extend("wait " + work for work in works))
    runner: Any = object.__new__(getattr(schedules, single or "_PipelineScheduleRuntime"))
    runner._n_microbatches, runner._num_stages, runner.rank = schedule.num_micro_batches, schedule.num_parts, rank
    runner._stage, runner._stages, runner.scale_grads = stages[0], stages, False
    runner._internal_losses, runner._loss_fn = [], None
    for name in ("_initialize_stage", "_initialize_stages", "_maybe_compute_loss", "_update_losses", "_maybe_get_loss"):
        setattr(runner, name, lambda *args, **kwargs: None)
    if not single:
        runner._defer_pp_recv, runner.pp_group_size = False, schedule.num_stages
        runner._comp_type_to_function_map, runner.backward_counter = {}, schedules.Counter()
        runner.fwd_recv_ops, runner.bwd_recv_ops, runner.unshard_ops = {}, {}, {}
        runner._prepare_schedule_with_comms(torch_actions(schedule))
    runner._step_microbatches()
    if single == "Schedule1F1B":  # it waits for the last send of the warm-up twice
        rows = [row for at, row in enumerate(rows) if row.startswith("post") or row not in rows[:at]]
    return rows


def torch_actions(schedule: Schedule) -> dict[int, list[Any]]:
    """A schedule as torch's actions."""
    part_of = schedule.part_of
    actions: dict[int, list[Any]] = {}
    for stage, rows in enumerate(schedule.actions):
        row = [
            schedules._Action.from_str(f"{part_of[stage, chunk]}{KIND_NAMES[kind]}{micro}")
            for kind, micro, chunk in rows.tolist()
        ]
        if schedule.fused:
            for at in np.flatnonzero(schedule.fused[stage])[::-1].tolist():
                row[at : at + 2] = [schedules._Action(-1, schedules.OVERLAP_F_B, None, tuple(row[at : at + 2]))]
        actions[stage] = row
    return actions


def our_rows(track: Track, rank: int) -> list[str]:
    """What a rank does, in the same words."""
    rows = []
    for op, stage, index, side in zip(*(field.tolist() for field in track.entries), strict=True):
        if stage != rank:
            continue
        action = index if op == COMPUTE else int(track.source[index])
        kind = KIND_NAMES[track.kind[action]]
        name = f"{track.part[action]}{kind if op == COMPUTE or kind == 'F' else 'G'}{track.micro_batch[action]}"
        words = {
            COMPUTE: "compute",
            POST: ("post send", "post receive")[side],
            WAIT: ("wait send", "wait receive")[side],
        }
        rows.append(f"{words[op]} {name}")
    return rows


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 3), (4, 8), (4, 5)])
@pytest.mark.parametrize(("name", "single"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_loops_of_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, single: str, stages: int, micro_batches: int
) -> None:
    """What torch does between two passes; gloo decides the order of a send and a receive that are posted together."""
    schedule = find_schedule(name, stages, micro_batches)
    for rank in range(stages):
        ours, real = our_rows(track(schedule, "torch"), rank), torch_rows(monkeypatch, schedule, rank, single)
        assert between_passes(ours) == between_passes(real)


def between_passes(rows: list[str]) -> list[list[str]]:
    """The passes, and sorted what is done before each."""
    found: list[list[str]] = [[]]
    for row in rows:
        found[-1].append(row)
        if row.startswith("compute"):
            found.append([])
    return [[*sorted(each[:-1]), *each[-1:]] for each in found]


def test_messages_that_are_posted_together_follow_each_other() -> None:
    """Gloo sends the gradient before the result that the other rank sends: a cycle of 1F1B holds both."""
    schedule = find_schedule("1f1b", 2, 4)
    last = our_rows(track(schedule, "torch"), 1)
    at = last.index("compute 1B0")
    assert last[at + 1 : at + 6] == [
        "post send 1G0", "wait send 1G0", "post receive 0F1", "wait receive 0F1", "compute 1F1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "v"),
    [
        ("1f1b", 2, 4, 2),
        ("1f1b", 4, 8, 3),
        ("1f1b", 4, 8, 5),  # more parts than torch keeps unsharded
        ("looped-bfs", 4, 6, 2),
        ("zb-h1", 4, 8, 1),
        ("interleaved-zb", 4, 8, 2),
        ("interleaved-zb", 2, 6, 4),
        ("zbv", 4, 8, 2),
        ("zbv", 4, 3, 2),
        ("dualpipev", 4, 9, 2),
    ],
)
def test_lowering_of_torch(monkeypatch: pytest.MonkeyPatch, name: str, stages: int, micro_batches: int, v: int) -> None:
    schedule = find_schedule(name, stages, micro_batches, v)
    ours = track(schedule, "torch")
    for rank in range(stages):
        assert our_rows(ours, rank) == torch_rows(monkeypatch, schedule, rank)


def test_asynchronous_ranks_ask_wait_compute_and_send() -> None:
    assert our_rows(find_track("1f1b", 2, 1), 0) == ["compute 0F0", "post send 0F0"] + [
        f"{word} 1G0".replace("compute 1G0", "compute 0B0") for word in ("post receive", "wait receive", "compute")
    ]


def test_schedules_that_only_torch_cannot_run_are_explained() -> None:
    """A pair that runs as one sends nothing before it is done: here its second half needs the first."""
    rows = [np.array([(FORWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, 1), (BACKWARD, 0, 0)], dtype=np.int32)]
    for at, who in ((0, "F0 of part 1 waits for F0 of part 0"), (2, "B0 of part 0 waits for B0 of part 1")):
        fused = np.zeros(4, dtype=np.bool_)
        fused[at] = True
        schedule = Schedule(tuple(rows), 1, v_placement(1), fused=(fused,))
        track(schedule)
        with pytest.raises(JobError, match=f"must not deadlock, got: stage 0 at {who}"):
            track(schedule, "torch")


def test_a_users_schedule_of_a_known_name_runs_as_its_own() -> None:
    """Only torch's own GPipe runs in torch's GPipe loop."""
    usual = find_schedule("gpipe", 2, 2)
    turned = tuple(np.concatenate([rows[:2], rows[:1:-1]]) for rows in usual.actions)
    other = track(Schedule(turned, 2, usual.placement, "gpipe"), "torch")
    assert our_rows(other, 1)[:3] == ["post receive 0F0", "wait receive 0F0", "compute 1F0"]
    assert "post receive 1G1" in our_rows(other, 0)


def deepspeed_rows(stages: int, micro_batches: int, stage: int) -> list[str]:
    """DeepSpeed's ``TrainSchedule.steps`` in the same words: a step of all stages after the other, forward and backward
    in turn, neighbours doing the opposite."""
    rows: list[str] = []

    def pass_(words: str) -> None:
        rows.extend((f"post {words}", f"wait {words}"))

    before = -1
    for step in range(2 * (micro_batches + stages - 1)):
        forward = step % 2 == stage % 2
        micro = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
        valid, late = 0 <= micro < micro_batches, 0 <= before < micro_batches
        if forward and stage > 0:
            _ = late and pass_(f"send {stage}G{before}")
            _ = valid and pass_(f"receive {stage - 1}F{micro}")
        if not forward and stage < stages - 1:
            _ = valid and pass_(f"receive {stage + 1}G{micro}")
            _ = late and pass_(f"send {stage}F{before}")
        if valid:
            rows.append(f"compute {stage}{'F' if forward else 'B'}{micro}")
        before = micro
    if stage > 0:  # the last gradient is sent in a step of its own
        last = f"send {stage}G{micro_batches - 1}"
        _ = f"post {last}" in rows or pass_(last)
    return rows


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (2, 5), (4, 2), (4, 3), (4, 8), (5, 7)])
def test_deepspeed_passes_one_message_after_the_other(stages: int, micro_batches: int) -> None:
    ours = find_track("1f1b", stages, micro_batches, runtime="deepspeed")
    for stage in range(stages):
        assert our_rows(ours, stage) == deepspeed_rows(stages, micro_batches, stage)


def test_deepspeed_has_no_virtual_stages() -> None:
    with pytest.raises(
        JobError, match="runs schedule 1f1b without virtual stages or several flushes, got 1f1b with 2 "
    ):
        find_track("1f1b", 2, 4, 2, "deepspeed")
