"""Start the ranks of a launch, forward what they print, and end all of them when one fails.

``torch.distributed.run`` does the same, but its rendezvous listens on every address of the machine.  Here ranks on one
machine find each other through a file (see ``rendezvous``).  On several nodes start the ranks of each node with the
same plan and a folder that all nodes share; the first rank listens on ``--address`` alone::

    python -m harness.running.workers --nodes 2 --node 0 --ranks 8 --address 10.0.0.1:29500 plan.json --out DIR
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# One thread a rank, output line by line, and a watch on standard input.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "STEPSIGHT_WATCH_STDIN": "1",
}
_OUTLIVED_S = 1.0  # seconds for which output is read after all ranks have ended: their children may keep the pipe open


def places(ranks: int, nodes: int = 1, node: int = 0) -> list[dict[str, str]]:
    """Environment variables that give each rank of a node its number, named as torchrun names them."""
    return [
        {
            "RANK": str(node * ranks + local),
            "WORLD_SIZE": str(nodes * ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        for local in range(ranks)
    ]


class Workers:
    """Processes that run one command and end together.

    When one fails, the others are killed.  All watch their standard input, which ends when this process ends.

    Args:
        command: What every process runs.
        environments: Whole environment of each process.
        descriptors: Open files that all of them inherit.

    Attributes:
        code: Exit code of the first process that failed (negative: the signal that killed it), 0 if none did.
    """

    def __init__(self, command: list[str], environments: list[dict[str, str]], descriptors: Sequence[int] = ()) -> None:
        self.code = 0
        self._events: queue.Queue[str | subprocess.Popen[bytes] | None] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        output, into = os.pipe()
        held, self._hold = os.pipe()
        try:
            for environment in environments:
                process = subprocess.Popen(
                    command,
                    stdin=held,
                    stdout=into,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                    pass_fds=descriptors,
                )
                self._processes.append(process)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(held)
            os.close(into)
            threading.Thread(target=self._read, args=(output,), daemon=True).start()
        for process in self._processes:
            threading.Thread(target=self._wait, args=(process,), daemon=True).start()

    def lines(self) -> Iterator[str]:
        """Yield the lines of all processes until all have ended."""
        running, open_ = len(self._processes), True
        while running or open_:
            try:
                event = self._events.get(timeout=None if running else _OUTLIVED_S)
            except queue.Empty:
                return
            if isinstance(event, str):
                yield event
            elif event is None:
                open_ = False
            else:
                running -= 1
                if event.returncode and not self.code:
                    self.code = event.returncode
                    self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """End all processes: the end of standard input ends workers, signals end the rest."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _read(self, output: int) -> None:
        with os.fdopen(output, encoding="utf-8", errors="replace") as source:
            for line in source:
                self._events.put(line)
        self._events.put(None)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with suppress(ProcessLookupError, PermissionError):  # what it started and left
            os.killpg(process.pid, signal.SIGKILL)
        self._events.put(process)


def main(arguments: list[str] | None = None) -> int:
    """Run this node's ranks; return the exit code."""
    parser = argparse.ArgumentParser(prog="harness.running.workers", description="All ranks of one node.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the collection, shared by all nodes")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of each node")
    parser.add_argument("--address", required=True, help="HOST:PORT of node 0 that all nodes reach; it listens there")
    options = parser.parse_args(arguments)
    host, _, port = options.address.rpartition(":")
    common = {**os.environ, **WORKER_ENVIRONMENT, "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    package = __package__ or "harness.running"
    workers = Workers(
        [sys.executable, "-m", f"{package}.worker", str(options.plan), "--out", str(options.out)],
        [{**common, **place} for place in places(options.ranks, options.nodes, options.node)],
    )
    try:
        for line in workers.lines():
            print(line, end="", flush=True)
    finally:
        workers.stop()
    return workers.code if workers.code >= 0 else 128 - workers.code


if __name__ == "__main__":
    sys.exit(main())
