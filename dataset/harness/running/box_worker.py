"""All ranks of a collection in a cluster in a box: ``python -m harness.running.box_worker plan.json --out DIR``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ..box.namespaces import die_with, run_box
from .worker import collect_rank


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    name = "harness.running.box_worker"
    parser = argparse.ArgumentParser(prog=name, description="All ranks of a collection in a box.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text("utf-8"))
    die_with(os.getppid())
    from . import collection  # noqa: F401  torch takes seconds to import: the ranks are forks that share it

    return run_box(plan["box"], lambda: collect_rank(plan, options.out))


if __name__ == "__main__":
    sys.exit(main())
