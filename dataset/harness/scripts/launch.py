"""Start the ranks of a user's script, follow them, and end them and their children if one fails.

Each rank, or all ranks of a box, is ``python -m harness.scripts.launch settings.json``: it runs the script unmodified,
as ``python train.py`` does, and ends with the last measured step.  What the script prints goes to standard output;
lines that begin with ``PROGRESS`` are this module's.  Until a rank runs, this is the standard library only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..base import cores
from ..base.atomic_files import read_json, write_json
from ..base.errors import HarnessError, error_text, line_of, line_of_thread, print_own_traceback
from ..running.box import run_box
from ..running.workers import PIPES, end_with_launcher, how_ended, place, places, report, run_module
from .step_marks import listening, watch_optimizers, watch_profilers

_TORCHRUN = {  # what scripts read; nobody listens at that address
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "stepsight"
}  # fmt: skip
_SHOWN = 200  # characters of the last line of output
_OTHERS_TELL_S = 0.5  # seconds in which other late ranks also report their lines


@dataclass(frozen=True)
class Ranks:
    """The processes of a script: what tells each one its place, and open files that they inherit.

    ``box``: whose ranks they are, started by one process; None outside of a box.
    """

    environments: Sequence[Mapping[str, str]]
    descriptors: Sequence[int] = ()
    box: Mapping[str, Any] | None = None

    @classmethod
    def here(cls, ranks: int | None) -> Ranks:
        """Ranks of this machine, as torchrun starts them; None: one process without ranks, as ``python`` does."""
        return cls([{}] if ranks is None else [{**_TORCHRUN, **place} for place in places(ranks)])

    @classmethod
    def emulated(cls, pipes: Mapping[int, tuple[int, int]], world_size: int, devices_per_node: int) -> Ranks:
        """Some ranks of a world; ``pipes`` are where each one asks for delays, and where it reads them."""
        local_size, environments = min(world_size, devices_per_node), []
        for rank, ends in pipes.items():
            own = place(rank, world_size, rank % devices_per_node, local_size)
            environments.append({**_TORCHRUN, **own, PIPES: ",".join(map(str, ends))})
        return cls(environments, [end for ends in pipes.values() for end in ends])

    @classmethod
    def in_box(cls, box: Mapping[str, Any]) -> Ranks:
        """All ranks of a box, a plan's table."""
        return cls([_TORCHRUN], box=box)

    @property
    def numbers(self) -> list[int]:
        if self.box is not None:
            return list(range(self.box["nodes"] * self.box["ranks_per_node"]))
        return [int(environment.get("RANK", "0")) for environment in self.environments]


def run_ranks(
    settings: dict[str, Any], folder: Path, log: Path, ranks: Ranks, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run a script on all ranks until its measured steps are done; return what each rank wrote (see ``stages``).

    ``settings`` are those of ``run_rank``, without ``out``: ``folder``, which exists, gets what ranks measure.  Raises
    ``HarnessError`` with the script's own line if a rank failed, or the script cannot be measured.
    """
    path, boxed = folder / "settings.json", {"box": dict(ranks.box)} if ranks.box is not None else {}
    write_json(path, {**settings, **boxed, "out": str(folder.resolve())})
    refused, late, numbers = list[str](), dict[int, str](), ranks.numbers

    def told(facts: dict[str, Any]) -> None:
        refused.extend([facts["refused"]] if facts.get("refused") else [])
        if facts.get("at"):
            late[facts["rank"]] = facts["at"]
        elif facts.get("rank") == numbers[0]:
            say(facts["doing"])

    arguments = [str(path.resolve())], folder, ranks.environments, log, told
    code, last = run_module("scripts.launch", *arguments, descriptors=ranks.descriptors)
    if refused:
        at = ", ".join(f"rank {rank} is at {late[rank]}" for rank in sorted(late))
        raise HarnessError(f"{refused[0]}{'; ' + at if len(late) > 1 else ''}; see {log}")
    if code:
        why = ("was " if code < 0 else "") + how_ended(code) + (f": {last:.{_SHOWN}}" if last else "")
        raise HarnessError(f"the script's process {why}; see {log}")
    path.unlink()
    found = []
    for rank in numbers:
        written = folder / f"script_rank{rank}.json"
        if not written.exists():
            raise HarnessError(f"rank {rank} of the script ended without output; see {log}")
        found.append(read_json(written))
        written.unlink()
    return found


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
    emulated, boxed = settings.get("emulate"), "box" in settings
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if emulated:  # dynamo cannot trace collectives of our groups: such functions run as they are written
        os.environ["TORCHDYNAMO_SUPPRESS_ERRORS"] = "1"
    import torch

    from ..base import annotate
    from ..measuring.timing import Profiler
    from .stages import EmulatedWorld, Stages, annotate_compiled, rendezvous_alone, rendezvous_through_file

    torch.set_num_threads(1)
    if emulated or boxed:
        cores.go_first()  # it must not be late because others compute
    if boxed:
        cores.hurry_communication()
    elif not torch.cuda.is_available():
        at_home = int(os.environ.get("LOCAL_RANK", "0"))
        cores.pin(emulated["ranks"].index(int(os.environ["RANK"])) if emulated else at_home)
        os.register_at_fork(after_in_child=cores.unpin)
    annotate.install()
    if not emulated and not torch.cuda.is_available():
        annotate_compiled()
    world = EmulatedWorld(emulated) if emulated else None
    (rendezvous_alone if emulated else rendezvous_through_file)()
    stages = Stages(settings, int(os.environ.get("RANK", "0")), leave, world)
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
        rule = f"{script.name} must be through with its measured steps within --timeout-s {limit_s:g}"
        rule += f", but it is {found}" + (f", at {where}" if where else "")
        if started := len(multiprocessing.active_children()):
            rule += f"; it has started {started} processes, whose steps are not seen: start ranks with --nproc-per-node"
        refuse(rule)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
