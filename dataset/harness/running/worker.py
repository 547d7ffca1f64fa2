"""Run one rank of a collection, or all ranks of a box: ``python -m harness.running.worker plan.json --out DIR``.

The rank takes part in every run and every event file of its world size.  ``launch`` starts it on one machine, and
``workers`` on one of several nodes.  Another launcher (``srun``, ``mpirun``, torchrun) can start it too: it must set
``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.  Rank 0 then
listens on ``MASTER_ADDR`` alone, and collectives on the interface by which a node reaches it.  torchrun itself listens
on every address of the machine and unpickles what arrives: use it only in a network that others cannot reach.

It does what the plan holds for exactly as many ranks as there are; rank 0 of each node computes on the node's first
allowed core or GPU, and so on.  Rounds are interleaved over runs, so that a drift of the machine shows in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ..base.cores import die_with
from ..base.errors import HarnessError
from .box import run_box
from .workers import end_with_launcher, report


def main() -> None:
    """Run the rank that the environment names, or build the plan's box and run its ranks."""
    parser = argparse.ArgumentParser(prog="harness.running.worker", description="One rank of a collection.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text("utf-8"))
    if "box" not in plan:
        if os.environ.get("STEPSIGHT_WATCH_STDIN"):
            end_with_launcher()
        collect_rank(plan, arguments.out)
    die_with(os.getppid())
    from . import collection  # noqa: F401  torch takes seconds to import: the ranks are forks that share it

    sys.exit(run_box(plan["box"], lambda: collect_rank(plan, arguments.out)))


def collect_rank(plan: dict[str, Any], out: Path) -> NoReturn:
    """Do the work of a plan for this rank's world size, and end the process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in this process: no others beside what is measured
    from .collection import Collection  # torch takes seconds to import: not before the arguments are good

    try:
        Collection(plan, out, report).run()
    except HarnessError as error:
        report(refused=str(error))
        sys.exit(2)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        report(failed=f"{type(error).__name__}: {error}")
        os._exit(1)  # other ranks may be waiting for this one: no clean way out through their collectives
    leave()


def leave() -> NoReturn:
    """End the process at once: tearing gloo's threads down now and then aborts, when all the work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
