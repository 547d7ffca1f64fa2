"""Start the ranks of a launch, forward what they print, and end all of them when one fails.

``torch.distributed.run`` does the same, but its rendezvous listens on every address of the machine.  Here ranks on one
machine find each other through a file (see ``meeting_file``).  On several nodes start the ranks of each node with the
same plan and a folder that all nodes share; the first rank listens on ``--address`` alone::

    python -m harness.running.workers --nodes 2 --node 0 --ranks 8 --address 10.0.0.1:29500 plan.json --out DIR
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import HarnessError

if TYPE_CHECKING:
    import torch

FILE = "STEPSIGHT_RENDEZVOUS"  # environment variable: the file through which the ranks of one machine meet
PIPES = "STEPSIGHT_DELAYS"  # the same: where an emulated rank asks for delays of collectives, and reads them
_PATIENCE = timedelta(minutes=10)
_ADDRESS_OF = 0x8915  # ioctl SIOCGIFADDR
_BACKLOG = 4096  # connections that may wait: one of every rank

# One thread a rank, output line by line, and a watch on standard input.
_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED", "STEPSIGHT_WATCH_STDIN")
WORKER_ENVIRONMENT = dict.fromkeys(_ON, "1")
PROGRESS = "@stepsight "  # prefix of a progress line on standard output
_OUTLIVED_S = 1.0  # seconds for which output is read after all ranks have ended: their children may keep the pipe open


def place(*numbers: int) -> dict[str, str]:
    """Environment variables of a rank, named as torchrun does: its number, of how many, and likewise on its node."""
    return dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), map(str, numbers), strict=True))


def places(ranks: int, nodes: int = 1, node: int = 0) -> list[dict[str, str]]:
    """What gives each rank of a node its number."""
    return [place(node * ranks + local, nodes * ranks, local, ranks) for local in range(ranks)]


class Workers:
    """Processes that run one command in their environments and end together; when one fails, the others are killed.

    All watch their standard input, which ends when this process ends, and inherit the open files ``descriptors``.
    ``code`` is the exit code of the first that failed (negative: the signal that killed it), 0 if none did.
    """

    def __init__(self, command: list[str], environments: list[dict[str, str]], descriptors: Sequence[int] = ()) -> None:
        self.code = 0
        self._events: queue.Queue[str | subprocess.Popen[bytes] | None] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        output, into = os.pipe()
        held, self._hold = os.pipe()
        streams: dict[str, Any] = {"stdin": held, "stdout": into, "stderr": subprocess.STDOUT}
        try:
            for own in environments:
                process = subprocess.Popen(command, env=own, start_new_session=True, pass_fds=descriptors, **streams)
                self._processes.append(process)
        except BaseException:
            self.close()
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

    def close(self) -> None:
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


def run_module(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    each: Sequence[Mapping[str, str]],
    log: Path,
    told: Callable[[dict[str, Any]], None],
    *,
    descriptors: Sequence[int] = (),
) -> tuple[int, str]:
    """Run a module of the harness in processes that meet on this machine, until all have ended.

    All share ``folder`` and inherit ``descriptors``; ``each`` tells one its place.  What they print is logged, what
    they report is passed on.  Returns ``Workers.code``, and the last line before a failure.
    """
    package, last = (__package__ or "harness.running").rpartition(".")[0], ""
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    if "." not in package:  # copied as one folder: its parent must be importable
        parents = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, parents))
    log.parent.mkdir(parents=True, exist_ok=True)
    with meeting_file(folder) as meeting, log.open("a", encoding="utf-8") as stream:
        command = [sys.executable, "-P", "-m", f"{package}.{module}", *arguments]
        environments = [{**environment, **meeting, **place} for place in each]
        with closing(Workers(command, environments, descriptors)) as workers:
            for line in workers.lines():
                text, found, facts = line.partition(PROGRESS)
                if text.strip():
                    stream.write(text.rstrip("\n") + "\n")
                    last = text.strip() if not workers.code else last
                if found:
                    told(json.loads(facts))
    return workers.code, last


def how_ended(code: int) -> str:
    """How a process ended without a message: ``ended with code 3``, ``killed by SIGKILL``."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")


def report(**facts: Any) -> None:
    """Tell the launcher something; independent of unfinished output of a script."""
    sys.stdout.flush()
    os.write(1, f"\n{PROGRESS}{json.dumps(facts)}\n".encode())


def end_with_launcher() -> None:
    """End this process and its children with the launcher; from now on its standard input is empty."""
    held = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(held, False)

    def watch() -> None:
        while os.read(held, 1):  # the launcher keeps the other end open and never writes to it
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def meeting_file(out: Path) -> Iterator[dict[str, str]]:
    """Environment variables of ranks that meet on this machine, until the block ends.

    The file lies in a folder that no other user can enter.  What a killed launch left is removed.
    """
    place = out / ".rendezvous"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(exist_ok=True)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    try:
        folder = tempfile.mkdtemp(dir=place)  # ranks of a killed launch that still run do not find this name
        file = str(Path(folder).resolve() / "store")
        yield {FILE: file, "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def join(backend: str, device: torch.device | None = None) -> None:
    """Join the process group of all ranks; the environment names this rank and the address of the others."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if file := os.environ.get(FILE):
        store: Any = dist.FileStore(file, size)  # type: ignore[attr-defined]
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        interface = _interface_to(host, port)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it listens itself, on every address
        listener = _listen(host, port).detach() if rank == 0 and not torchrun else None
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, listener is not None, _PATIENCE, wait_for_workers=False, master_listen_fd=listener
        )
    store.set_timeout(_PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE, device_id=device)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine alone."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise HarnessError(f"MASTER_ADDR must be an address of rank 0's node, got {host}:{port}: {error}") from None


def _interface_to(host: str, port: int) -> str:
    """The network interface by which this machine reaches an address, or the user's choice."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return os.environ["GLOO_SOCKET_IFNAME"]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # it has no address
                    found = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                    if found[20:24] == own or own[0] == found[20] == 127:
                        return name
        raise OSError("no interface has the address from which it is reached")
    except OSError as error:
        rule = "set GLOO_SOCKET_IFNAME to the interface by which nodes reach MASTER_ADDR"
        raise HarnessError(f"{rule} {host}: none was found ({error})") from None


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
    module = f"{__package__ or 'harness.running'}.worker"
    command = [sys.executable, "-m", module, str(options.plan), "--out", str(options.out)]
    environments = [{**common, **own} for own in places(options.ranks, options.nodes, options.node)]
    with closing(Workers(command, environments)) as workers:
        for line in filter(str.strip, workers.lines()):
            print(line, end="", flush=True)
    return workers.code if workers.code >= 0 else 128 - workers.code


if __name__ == "__main__":
    sys.exit(main())
