"""Start the ranks of a user's script, follow them, and end all that they started when one fails.

Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..atomic_files import read_json, write_json
from ..plan_error import HarnessError
from ..running.rendezvous import meeting_file
from ..running.worker import PROGRESS
from ..running.workers import WORKER_ENVIRONMENT, Workers, places

SETTINGS = "settings.json"
_STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # names that scripts read; nobody listens there
_TOLD = 200  # characters of a script's last line


def run_ranks(
    settings: dict[str, Any], folder: Path, log: Path, ranks: int | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run a script on all ranks until its measured steps are through.

    Args:
        settings: Of ``script_worker``, without ``out``.
        folder: An existing folder, where ranks write what they measure.
        log: Where their output goes.
        ranks: None: one process that knows of no ranks, as ``python train.py`` starts it.
        say: Told what goes on.

    Returns:
        What each rank wrote (see ``script_stages``).

    Raises:
        HarnessError: If a rank failed, or the script cannot be measured; with the script's own line.
    """
    write_json(folder / SETTINGS, {**settings, "out": str(folder.resolve())})
    package = (__package__ or "harness.scripts").rpartition(".")[0]
    command = [sys.executable, "-P", "-m", f"{package}.scripts.script_worker", str((folder / SETTINGS).resolve())]
    environment = {**os.environ, **WORKER_ENVIRONMENT, **(_as_torchrun(ranks) if ranks else {})}
    parents = [str(Path(__file__).resolve().parents[2])] if "." not in package else []
    if parents:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*parents, os.environ.get("PYTHONPATH", "")]))
    with meeting_file(folder) as meeting:
        workers = Workers(command, [{**environment, **meeting, **place} for place in _places(ranks)])
        try:
            _follow(workers, log, say)
        finally:
            workers.stop()
    (folder / SETTINGS).unlink()
    found = []
    for rank in range(ranks or 1):
        path = folder / f"script_rank{rank}.json"
        if not path.exists():
            raise HarnessError(f"rank {rank} of the script ended without a word; see {log}")
        found.append(read_json(path))
        path.unlink()
    return found


def _places(ranks: int | None) -> list[dict[str, str]]:
    return [{}] if ranks is None else places(ranks)


def _as_torchrun(ranks: int) -> Mapping[str, str]:
    """What scripts read to know that torchrun started them."""
    return {**_STORE, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": f"stepsight-{ranks}"}


def _follow(workers: Workers, log: Path, say: Callable[[str], None]) -> None:
    """Log the ranks' output and pass on their progress, until they have ended.

    Raises:
        HarnessError: If one failed or refused to be measured.
    """
    last, refused = "", ""
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
                if told.get("rank") == 0:
                    say(told["doing"])
    if refused:
        raise HarnessError(f"{refused}; see {log}")
    if workers.code:
        raise HarnessError(f"the script {_ended(workers.code)}{f': {last:.{_TOLD}}' if last else ''}; see {log}")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended its process with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")
