"""AICB: collectives inside a training loop, milliseconds; sizes in bytes of the gathered or whole buffer.

A collective comes hundreds of times: the median of its calls is one measurement.  What comes up to the second mark of
an end (the model's set-up, then the first iteration) sets communicators up and is left out.  Groups are within one
node; where a group's size is not said, its bandwidths are wrong too.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective
from stepsight.dataset.tables.rows import Rows, read_csv

_COLUMNS = ("comm_type", "comm_group_size", "msg_size", "stage", "_elapsed_time")


def read(rows: Rows) -> None:
    device = "a100-sxm-80gb" if "a100" in rows.path.name.lower() else ""
    calls: dict[tuple[Collective, str], list[float]] = defaultdict(list)
    ends = 0
    for line in read_csv(rows, _COLUMNS):
        kind, group = line.text("comm_type").rpartition(".")[2], line.text("comm_group_size")
        if kind == "epoch_end":
            rows.skip("the end of an iteration")
            ends += 1
        elif ends < 2 or line.text("stage").startswith("init"):
            rows.skip("up to the first iteration, which sets communicators up")
        elif kind not in COLLECTIVE_KINDS:
            rows.skip(f"no collective kind for {kind}")
        elif group == "None":
            rows.skip("no group size")
        elif line.whole("msg_size", 0) == 0:
            rows.skip("no message size")
        else:
            size = line.whole("comm_group_size", 2)
            work = Collective(kind, line.whole("msg_size"), size, size)
            calls[work, line.text("stage")].append(line.real("_elapsed_time"))
    for (work, stage), times_ms in calls.items():
        rows.skip("folded into a median", len(times_ms) - 1)
        rows.add(
            work,
            median(times_ms) * 1e-3,
            device=device,
            fabric="dgx-a100" if device else "",
            software=f"aicb in a training loop: {stage}",
        )
