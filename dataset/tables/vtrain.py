"""vTrain (MICRO'24): NCCL all-reduce tables of one node, nanoseconds.

The number of GPUs is in the name of the file alone, the device in its folder's.  Of the two times with one name the
first is out of place, the second in place, as a training step reduces.
"""

from __future__ import annotations

import re

from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.tables.device_names import device_name
from stepsight.dataset.tables.rows import Rows, read_text

# All-to-all NVLink: 229 and 134 GB/s of bus bandwidth over 8 devices.
_DEVICES = {"a100": "a100-sxm-80gb", "v100": "v100-sxm-32gb"}
_FABRICS = {"a100": "dgx-a100", "v100": "dgx-1v"}
_HEADER = "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)"


def read(rows: Rows) -> None:
    found = re.match(r"AR_GPU(\d+)_", rows.path.name)
    if found is None or int(found[1]) < 2:
        raise rows.error("the name must begin with AR_GPU and the number of GPUs, at least 2")
    group, folder = int(found[1]), rows.path.parent.name
    device, fabric = _DEVICES.get(folder) or device_name(folder), _FABRICS.get(folder, "")
    header, *lines = read_text(rows).splitlines() or [""]
    if header.strip() != _HEADER:
        raise rows.error(f"the header must be {_HEADER}")
    for number, line in enumerate(lines, 1):
        try:
            size_text, _, _, _, _, in_place_ns, _ = line.split(",")
            size, seconds = int(size_text), float(in_place_ns) * 1e-9
        except ValueError:
            raise rows.error(f"a row must have seven cells with sizes and times, got {line!r:.80}", number) from None
        if size < 1:
            raise rows.error(f"size must be >= 1, got {size}", number)
        work = Collective("all_reduce", size, group, group)
        rows.add(work, seconds, device=device, fabric=fabric, software="nccl-tests in-place")
