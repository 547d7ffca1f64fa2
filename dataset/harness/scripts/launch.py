"""Start the ranks of a user's script, follow them, and end them and their children if one fails.

Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.atomic_files import read_json, write_json
from ..base.plan_error import HarnessError
from ..running.worker import PROGRESS
from ..running.workers import WORKER_ENVIRONMENT, Workers, meeting_file, places

SETTINGS = "settings.json"
PIPES = "STEPSIGHT_DELAYS"  # environment variable of ``world``
_TORCHRUN = {  # what scripts read; nobody listens at that address
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "stepsight"
}  # fmt: skip
_SHOWN = 200  # characters of the last line of output


@dataclass(frozen=True)
class Ranks:
    """The processes of a script.

    Attributes:
        environments: What tells each one its place.
        descriptors: Open files that they inherit.
        box: Whose ranks they are, started by one process; None outside of a box.
    """

    environments: Sequence[Mapping[str, str]]
    descriptors: Sequence[int] = ()
    box: Mapping[str, Any] | None = None

    @classmethod
    def as_python(cls) -> Ranks:
        """One process without ranks, as ``python train.py`` starts it."""
        return cls([{}])

    @classmethod
    def as_torchrun(cls, ranks: int) -> Ranks:
        """All ranks of this machine, with the variables by which scripts recognise torchrun."""
        return cls([{**_TORCHRUN, **place} for place in places(ranks)])

    @classmethod
    def emulated(cls, pipes: Mapping[int, tuple[int, int]], world_size: int, devices_per_node: int) -> Ranks:
        """Some ranks of a world; ``pipes`` are where each one asks for delays, and where it reads them."""
        environments = [
            {
                **_TORCHRUN,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % devices_per_node),
                "LOCAL_WORLD_SIZE": str(min(world_size, devices_per_node)),
                PIPES: ",".join(map(str, ends)),
            }
            for rank, ends in pipes.items()
        ]
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
    """Run a script on all ranks until its measured steps are done.

    Args:
        settings: Of ``worker``, without ``out``.
        folder: An existing folder, where ranks write what they measure.
        log: Where their output goes.
        ranks: The processes.
        say: Told what goes on.

    Returns:
        What each rank wrote (see ``stages``).

    Raises:
        HarnessError: If a rank failed, or the script cannot be measured; with the script's own line.
    """
    boxed = {"box": dict(ranks.box)} if ranks.box is not None else {}
    write_json(folder / SETTINGS, {**settings, **boxed, "out": str(folder.resolve())})
    package = (__package__ or "harness.scripts").rpartition(".")[0]
    command = [sys.executable, "-P", "-m", f"{package}.scripts.worker", str((folder / SETTINGS).resolve())]
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    if "." not in package:  # the folder was copied alone
        folders = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    with meeting_file(folder) as meeting:
        environments = [{**environment, **meeting, **place} for place in ranks.environments]
        workers = Workers(command, environments, ranks.descriptors)
        try:
            _follow(workers, log, ranks.numbers[0], say)
        finally:
            workers.stop()
    (folder / SETTINGS).unlink()
    found = []
    for rank in ranks.numbers:
        path = folder / f"script_rank{rank}.json"
        if not path.exists():
            raise HarnessError(f"rank {rank} of the script ended without output; see {log}")
        found.append(read_json(path))
        path.unlink()
    return found


def _follow(workers: Workers, log: Path, first: int, say: Callable[[str], None]) -> None:
    """Log the ranks' output and pass on their progress, until they have ended.

    Raises:
        HarnessError: If one failed or refused to be measured.
    """
    last, refused = "", ""
    late: dict[int, str] = {}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        for line in workers.lines():
            text, found, facts = line.partition(PROGRESS)
            if text.strip():
                stream.write(text.rstrip("\n") + "\n")
                last = text.strip() if not workers.code else last
            if found:
                told = json.loads(facts)
                refused = refused or told.get("refused", "")
                if told.get("at"):
                    late[told["rank"]] = told["at"]
                elif told.get("rank") == first:
                    say(told["doing"])
    if refused:
        if len(late) > 1:
            refused += "; " + ", ".join(f"rank {rank} is at {late[rank]}" for rank in sorted(late))
        raise HarnessError(f"{refused}; see {log}")
    if workers.code:
        raise HarnessError(f"the script {_ended(workers.code)}{f': {last:.{_SHOWN}}' if last else ''}; see {log}")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended its process with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")
