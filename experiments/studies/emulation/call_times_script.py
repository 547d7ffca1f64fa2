"""A script that times calls of all-reduce one by one: ``python call_times_script.py OUT VALUES…``.

Rank 0 writes the seconds of each call, by number of values, to ``OUT`` after every step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Call in an endless loop."""
    dist.init_process_group("gloo")
    out, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    found: dict[int, list[float]] = {size: [] for size in sizes}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # its steps are the script's
    while True:
        for size in sizes:
            values = torch.zeros(size)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(values)
            found[size].append(time.perf_counter() - begin)
        if dist.get_rank() == 0:
            new = out.with_suffix(".new")
            new.write_text(json.dumps(found))
            new.replace(out)
        optimizer.step()


if __name__ == "__main__":
    main()
