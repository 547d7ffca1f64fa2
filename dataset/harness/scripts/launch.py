"""Start the ranks of a user's script, follow them, and end them and their children if one fails.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.atomic_files import read_json, write_json
from ..base.errors import HarnessError
from ..running.workers import how_ended, place, places, run_module

SETTINGS = "settings.json"
PIPES = "STEPSIGHT_DELAYS"  # environment variable of ``stages``
_TORCHRUN = {  # what scripts read; nobody listens at that address
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "stepsight"
}  # fmt: skip
_SHOWN = 200  # characters of the last line of output


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

    ``settings`` are those of ``worker``, without ``out``: ``folder``, which exists, gets what ranks measure.  Raises
    ``HarnessError`` with the script's own line if a rank failed, or the script cannot be measured.
    """
    path, boxed = folder / SETTINGS, {"box": dict(ranks.box)} if ranks.box is not None else {}
    write_json(path, {**settings, **boxed, "out": str(folder.resolve())})
    refused, late, numbers = list[str](), dict[int, str](), ranks.numbers

    def told(facts: dict[str, Any]) -> None:
        refused.extend([facts["refused"]] if facts.get("refused") else [])
        if facts.get("at"):
            late[facts["rank"]] = facts["at"]
        elif facts.get("rank") == numbers[0]:
            say(facts["doing"])

    arguments = [str(path.resolve())], folder, ranks.environments, log, told
    code, last = run_module("scripts.worker", *arguments, descriptors=ranks.descriptors)
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
