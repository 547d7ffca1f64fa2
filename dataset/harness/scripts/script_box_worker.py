"""Run all ranks of a user's script in a box: ``python -m harness.scripts.script_box_worker settings.json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ..box.namespaces import die_with, run_box
from .script_worker import run_rank


def main() -> int:
    """Build the box and run its ranks; return the exit code."""
    settings = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    die_with(os.getppid())
    from . import emulated_world, script_stages  # noqa: F401  torch takes seconds to import: the ranks share it

    return run_box(settings["box"], lambda: run_rank(settings))


if __name__ == "__main__":
    sys.exit(main())
