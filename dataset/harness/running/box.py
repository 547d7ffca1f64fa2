"""A cluster in a box: every node a network namespace of this machine, joined by links of a given rate.

A plan's ``box`` says how many nodes there are and how fast their links are; ``running.worker`` collects in it.
Real processes of ``torch.distributed`` talk over real TCP, and every rank listens in its node's network alone.
Computation is slept (see ``models.sleeping``), so sixteen ranks fit on two cores.

The namespaces have no names: a bridge in one, and one for each node, joined by pairs of ``veth`` that ``tc tbf`` limits
both ways.  The kernel removes them with the last process inside, and every process here is killed with its parent, so
nothing is left behind however it ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ..base.cores import die_with
from ..base.errors import HarnessError
from .workers import place

SUBNET = "10.77.0"
INTERFACE = "eth0"
BURST_BYTES = 65536  # bytes that pass a link at once: one packet as the kernel sends it
QUEUE_BYTES = 16 * 2**20  # bytes that a link may queue: more than TCP ever has in flight, so no packet is dropped
MTU = 9000
_NEW_NETWORK = 0x40000000


def check_possible(box: dict[str, Any]) -> None:
    """Refuse a box that this machine cannot hold, with what it lacks."""
    if not sys.platform.startswith("linux"):
        raise HarnessError(f"a box needs Linux's network namespaces, got {sys.platform}")
    if lacking := [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]:
        commands = "iproute2 and util-linux (the commands ip, tc and unshare)"
        raise HarnessError(f"a box needs {commands}: {', '.join(lacking)} not found")
    if why := _lacks(*_BUILT):
        rule = "a box needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and a kernel with veth, bridge and tbf"
        raise HarnessError(f"{rule}, got uid {os.geteuid()}: {why}")
    if any(box.get("latency_ms", ())) and (why := _lacks(*_BUILT, "tc qdisc add dev probe2 root netem delay 1ms")):
        raise HarnessError(f"latency_ms of a box needs netem, but this kernel has no sch_netem: {why}")


def _lacks(*commands: str) -> str:
    """Why these commands do not run in a new network namespace; empty if they do."""
    done = subprocess.run(["unshare", "--net", "sh", "-exc", "\n".join(commands)], capture_output=True, text=True)
    return " ".join(done.stderr.split())[-200:] if done.returncode else ""


_BUILT = (
    "ip link add probe0 type bridge",
    "ip link add probe1 type veth peer name probe2",
    "tc qdisc add dev probe1 root tbf rate 10mbit burst 64kb limit 1mb",
)


def run_box(box: dict[str, Any], work: Callable[[], None]) -> int:
    """Run ``work`` in every rank of a box, its place in the environment; return the first exit code that is not 0.

    The calling process becomes the switch that joins the nodes.
    """
    gc.collect()
    gc.freeze()  # or every rank's own collection writes to, and so copies, all that they share
    _unshare()
    _run("ip link add switch type bridge")
    _run("ip link set switch up")
    workers: set[int] = set()
    here = os.getpid()
    for node in range(box["nodes"]):
        has_network, unshared = os.pipe()
        has_link, linked = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with(here)
            _leave(lambda: _node(node, box, unshared, has_link, work))  # noqa: B023
        workers.add(pid)
        os.close(unshared)  # so that a node that ends early ends the wait below
        if not os.read(has_network, 1):
            raise HarnessError(f"a box could not be built: node {node} ended")
        port = f"port{node}"
        _run(f"ip link add {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {pid}")
        _run(f"ip link set {port} master switch up")
        _limit(port, box["mbits_per_s"][node])
        os.write(linked, b"x")
    worst = 0
    while workers:
        pid, status = os.wait()
        workers.discard(pid)
        if code := os.waitstatus_to_exitcode(status):
            for other in workers:  # they would wait for it
                os.kill(other, signal.SIGTERM)
            worst = worst or code
    return worst


def _node(node: int, box: dict[str, Any], unshared: int, has_link: int, work: Callable[[], None]) -> int:
    """One node: its link, then its ranks.  It writes to ``unshared`` and waits for ``has_link``."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unshare()
    os.write(unshared, b"x")
    os.read(has_link, 1)
    _run(f"ip addr add {SUBNET}.{node + 1}/24 dev {INTERFACE}")
    _run(f"ip link set {INTERFACE} up")
    _run("ip link set lo up")
    _limit(INTERFACE, box["mbits_per_s"][node], box["latency_ms"][node] if any(box.get("latency_ms", ())) else 0.0)
    size, here = box["ranks_per_node"], os.getpid()
    for local in range(size):
        if os.fork() == 0:
            die_with(here)
            os.environ.update(place(node * size + local, box["nodes"] * size, local, size))
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
            _leave(work)
    for _ in range(size):
        _, status = os.wait()
        if code := os.waitstatus_to_exitcode(status):
            return code  # the others die with this process
    return 0


def _limit(device: str, mbits_per_s: float, late_ms: float = 0.0) -> None:
    """Limit the rate at which a device sends, and delay its packets."""
    if late_ms:
        _run(f"tc qdisc add dev {device} root handle 1: netem delay {late_ms:g}ms limit {QUEUE_BYTES // MTU}")
    where, rate = "parent 1:1" if late_ms else "root", f"{mbits_per_s * 1e6:.0f}bit"
    _run(f"tc qdisc add dev {device} {where} tbf rate {rate} burst {BURST_BYTES} limit {QUEUE_BYTES}")


def _run(words: str) -> None:
    done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"a box could not be built: {words}: {done.stderr.strip() or done.returncode}")


def _unshare() -> None:
    """Give the calling process its own network."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise HarnessError(f"a box needs root for its network namespaces: {os.strerror(ctypes.get_errno())}")


def _leave(work: Callable[[], Any]) -> None:
    """Run a forked process's work and end it, with its exit code."""
    code = 1
    try:
        code = work() or 0
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
