"""Run one rank of a user's script, or all ranks of a box: ``python -m harness.scripts.worker settings.json``.

The script runs unmodified, as ``python train.py`` runs it, and the process ends with its last measured step.  What it
prints goes to standard output; lines that begin with ``PROGRESS`` are this module's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from ..base import cores
from ..base.errors import HarnessError, error_text, line_of, line_of_thread, print_own_traceback
from ..running.box import run_box
from ..running.workers import end_with_launcher, report
from .step_marks import listening, watch_optimizers, watch_profilers

_OTHERS_TELL_S = 0.5  # seconds in which other late ranks also report their lines


def main() -> None:
    """Run the rank that the environment names, or build the box of the settings and run its ranks."""
    settings = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    if "box" not in settings:
        end_with_launcher()
        run_rank(settings)
    cores.die_with(os.getppid())
    from . import stages  # noqa: F401  torch takes seconds to import: the ranks share it

    sys.exit(run_box(settings["box"], lambda: run_rank(settings)))


def run_rank(settings: dict[str, Any]) -> NoReturn:
    """Run the script as one rank, and end the process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "emulate" in settings:  # dynamo cannot trace collectives of our groups: such functions run as they are written
        os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    import torch

    from ..base import annotate
    from ..measuring.timing import Profiler
    from .stages import EmulatedWorld, Stages, annotate_compiled, rendezvous_alone, rendezvous_through_file

    torch.set_num_threads(1)
    if "emulate" in settings or "box" in settings:
        cores.go_first()  # it must not be late because others compute
    if "box" in settings:
        cores.hurry_communication()
    elif not torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if "emulate" in settings:
            local = settings["emulate"]["ranks"].index(int(os.environ["RANK"]))
        cores.pin(local)
        os.register_at_fork(after_in_child=cores.unpin)
    annotate.install()
    if "emulate" not in settings and not torch.cuda.is_available():
        annotate_compiled()
    world = EmulatedWorld(settings["emulate"]) if "emulate" in settings else None
    (rendezvous_alone if world is not None else rendezvous_through_file)()
    rank = int(os.environ.get("RANK", "0"))
    stages = Stages(settings, rank, leave, world)
    watch_optimizers(stages.marks)
    watch_profilers(stages.marks, Profiler)
    script = Path(settings["script"])
    _watch_time(settings["timeout_s"], stages, script)
    with listening(stages.marks):
        run_script(script, settings["arguments"], stages)


def run_script(script: Path, arguments: list[str], stages: Any) -> NoReturn:
    """Run a script as Python's command line does, and end the process: where it ends by itself, it was not measured."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))  # nothing of it may come before what this process itself imports
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            refuse(f"the script ended itself before its measured steps were through: {error.code!s:.200}")
    except KeyboardInterrupt:
        os._exit(130)
    except HarnessError as error:
        where = line_of(error, script)
        refuse(str(error) + (f" at {where}" if where else ""))
    except BaseException as error:
        print_own_traceback(error)
        refuse(error_text(error, script))
    if not stages.marks.kind:
        refuse(
            f"a script must train, but {script.name} ended without a step of an optimizer of torch.optim or of a "
            "profiler; if it has steps of another kind, call stepsight.step() at the end of each. Processes that it "
            "starts itself are not seen: start ranks with --nproc-per-node"
        )
    fewer = "--warmup, --rounds, --steps and --profile-steps" if stages.traced else "--warmup, --rounds and --steps"
    refuse(
        f"{script.name} must run at least {stages.needed} steps, but it ended after {stages.marks.count} (by "
        f"{stages.marks.kind}); have it run more, or ask for fewer with {fewer}"
    )


def refuse(text: str) -> NoReturn:
    """End the process with a reason that the user can correct."""
    report(refused=text)
    sys.stderr.flush()
    os._exit(2)


def leave() -> None:
    """End the process, with all measurements on disk."""
    for child in multiprocessing.active_children():  # workers of data loaders
        child.kill()
    report(doing="done", rank=int(os.environ.get("RANK", "0")), done=True)
    os._exit(0)


def _watch_time(limit_s: float, stages: Any, script: Path) -> None:
    """End a script that takes too long, and report its current line."""
    thread = threading.get_ident()

    def watch() -> None:
        time.sleep(limit_s)
        where = line_of_thread(thread, script)
        report(doing="waits", rank=stages.rank, at=where)
        time.sleep(_OTHERS_TELL_S)
        found = f"after step {stages.marks.count} of {stages.needed}" if stages.marks.kind else "before its first step"
        started = len(multiprocessing.active_children())
        others = f"; it has started {started} processes, whose steps are not seen: start ranks with --nproc-per-node"
        refuse(
            f"{script.name} must be through with its measured steps within --timeout-s {limit_s:g}, but it is {found}"
            + (f", at {where}" if where else "")
            + (others if started else "")
        )

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
