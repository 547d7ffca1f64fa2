"""Nothing that stepsight starts listens beyond loopback or a box's own networks, and no other address reaches it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent / "dataset" / "harness"))
import harness_jobs as jobs

from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.running.box import SUBNET, check_possible
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.runs.run_manifest import HARDWARE, read_box
from stepsight.training.measured.planning import SleepingLatency, box_plan

SECOND_ADDRESS = "198.51.100.77"  # of a range for documentation
CODE = {"0A": "listens", "07": "receives"}  # states of TCP and UDP sockets in /proc/net
REPOSITORY = Path(__file__).parents[1]
JOB = REPOSITORY / "examples" / "local-gpt-tp2.toml"


class Listener(NamedTuple):
    """A socket on which a process waits for others."""

    network: str  # the network namespace
    address: IPv4Address | IPv6Address
    port: int


def listeners(root: int) -> set[Listener]:
    """Sockets on which a process or what it started waits, each in its own network namespace."""
    found = set()
    for pid in _family(root):
        with suppress(OSError):
            network = str(Path(f"/proc/{pid}/ns/net").readlink())
            held = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
            for table in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == ("0A" if "tcp" in table else "07") and f"socket:[{fields[9]}]" in held:
                        address, port = fields[1].split(":")
                        found.add(Listener(network, _address(address), int(port, 16)))
    return found


def _family(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    family = [root]
    for pid in family:
        family += parents.get(pid, [])
    return family


def _address(text: str) -> IPv4Address | IPv6Address:
    """An address as the kernel prints it: words of the machine's own byte order."""
    words = [bytes.fromhex(text[i : i + 8])[:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(text), 8)]
    address = ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


@pytest.fixture
def second_address() -> Iterator[str]:
    """An address of this machine that is not loopback."""
    command = ["ip", "addr", "add", f"{SECOND_ADDRESS}/32", "dev", "lo"]
    try:
        made = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if made:
        yield SECOND_ADDRESS
        subprocess.run(["ip", "addr", "del", f"{SECOND_ADDRESS}/32", "dev", "lo"], check=True)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SECOND_ADDRESS, 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no second address, and only root can add one (ip addr add)")
        own: str = probe.getsockname()[0]
    yield own


def watch(
    command: list[str], second: str, enough: Callable[[set[Listener]], bool], seconds: float = 300
) -> set[Listener]:
    """Look at a command's sockets while it runs, and try to connect to them from the second address.

    Args:
        enough: Ends the command early when it returns True for what was seen.

    Returns:
        All sockets seen.
    """
    seen: set[Listener] = set()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline and not enough(seen):
            for listener in listeners(process.pid) - seen:
                seen.add(listener)
                reached = _connects(second, listener.port) and listener in listeners(process.pid)
                assert not reached, f"{second} reaches {listener}"
            time.sleep(0.02)
        assert process.poll() in (None, 0), process.communicate()[1][-2000:]
    finally:
        process.terminate()  # not SIGINT, which a shell's background commands ignore
        process.communicate(timeout=60)
    return seen


def _connects(address: str, port: int) -> bool:
    """Whether somebody answers there.

    A socket whose own port happens to be the one that it asks for connects to itself.
    """
    with socket.socket() as attempt:
        attempt.bind((address, 0))
        attempt.settimeout(10)
        try:
            attempt.connect((address, port))
        except ConnectionRefusedError:
            return False
        return bool(attempt.getsockname() != attempt.getpeername())


def check(seen: set[Listener]) -> None:
    """In this machine's network all are loopback addresses."""
    ours = str(Path("/proc/self/ns/net").readlink())
    assert [listener for listener in seen if listener.network == ours and not listener.address.is_loopback] == []


def _collect(plan: dict[str, Any], folder: Path) -> list[str]:
    (folder / "plan.json").write_text(json.dumps(plan))
    return [sys.executable, "-m", "stepsight.dataset.harness", str(folder / "plan.json"), "--out", str(folder / "out")]


def test_listeners_are_seen(second_address: str) -> None:
    """The instrument sees a socket on every address, and could connect to it."""
    code = "import socket, time; s = socket.create_server(('0.0.0.0', 0)); time.sleep(60)"
    with pytest.raises(AssertionError, match="reaches"):
        watch([sys.executable, "-c", code], second_address, enough=bool)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_collection_listens_on_loopback(tmp_path: Path, second_address: str) -> None:
    """Two ranks wait for each other at 127.0.0.1 alone, whatever the environment says."""
    plan = jobs.plan([jobs.run("dp", jobs.job(dp=2), steps=10**6)])
    seen = watch(_collect(plan, tmp_path), second_address, enough=lambda seen: len(seen) >= 4)
    check(seen)
    assert len(seen) >= 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_collected_script_listens_on_loopback(tmp_path: Path, second_address: str) -> None:
    """Its ranks would meet at an address of all networks, as torchrun has it."""
    script = tmp_path / "train.py"
    place = "'tcp://0.0.0.0:29555', rank=int(os.environ['RANK']), world_size=2"
    script.write_text(
        f"import os, time, torch\ntorch.distributed.init_process_group('gloo', {place})\ntime.sleep(60)\n"
    )
    words = ["--out", str(tmp_path / "out"), "--nproc-per-node", "2", "--script", str(script)]
    seen = watch([sys.executable, "-m", "stepsight", "collect", *words], second_address, lambda seen: len(seen) >= 2)
    check(seen)
    assert len(seen) >= 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_nodes_listen_at_the_address_given(tmp_path: Path, second_address: str) -> None:
    """Two launches that meet at 127.0.0.1 run one plan; neither listens elsewhere."""
    plan = jobs.plan([jobs.run("dp", jobs.job(dp=2), rounds=1, profile_steps=0)])
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "stepsight.dataset.harness.running.workers", "--nodes", "2", "--ranks", "1"]
    command += ["--address", address, str(tmp_path / "plan.json"), "--out", str(tmp_path), "--node"]
    with subprocess.Popen([*command, "1"], stdout=subprocess.DEVNULL) as other:
        seen = watch([*command, "0"], second_address, enough=lambda seen: False)
        assert other.wait(timeout=60) == 0
    check(seen)
    assert int(address.rpartition(":")[2]) in {listener.port for listener in seen}
    assert (tmp_path / "runs" / "dp" / "manifest.json").exists()


def test_a_box_listens_in_its_own_networks(tmp_path: Path, second_address: str) -> None:
    """Ranks of a box wait in the namespaces of their nodes; this machine's network has no socket of theirs."""
    box = read_box("2x1@200mbit")
    try:
        check_possible(box.to_dict())
    except HarnessError as error:
        pytest.skip(str(error))
    hardware = find_hardware(HARDWARE)
    assert hardware is not None
    job = Job(
        model=ModelSpec(family="gpt", layers=2, hidden=256, heads=16, vocab=2048, seq_len=128),
        parallel=ParallelSpec(pp=2, dp=1),
        batch=BatchSpec(micro_batch=1, global_batch=2, precision="fp32"),
        cluster=ClusterSpec(hardware=HARDWARE, devices_per_node=2),
    )
    counts = {"rounds": 1, "steps": 200, "warmup": 1, "profile_steps": 0}
    plan = box_plan(box, [("a", "train", job, counts)], SleepingLatency(hardware, box.links))
    seen = watch(
        _collect(plan, tmp_path),
        second_address,
        enough=lambda seen: len(seen) >= 4 and len({listener.network for listener in seen}) >= 2,
    )
    ours = str(Path("/proc/self/ns/net").readlink())
    assert seen and all(listener.network != ours for listener in seen)
    assert len({listener.network for listener in seen}) == 2
    assert all(str(listener.address).startswith(f"{SUBNET}.") for listener in seen)


def test_a_search_listens_nowhere(tmp_path: Path, second_address: str) -> None:
    command = [sys.executable, "-m", "stepsight", "search", str(REPOSITORY / "examples" / "gpt3-175b-1024.toml")]
    command += ["--trials", "30", "--storage", f"sqlite:///{tmp_path}/study.db", "--study", "s"]
    assert watch(command, second_address, enough=lambda seen: False) == set()


@pytest.mark.storm
def test_a_training_listens_nowhere(tmp_path: Path, second_address: str) -> None:
    """Nor does the store of its runs."""
    command = [sys.executable, "-m", "stepsight"]
    counts = ["--rounds", "1", "--steps", "3", "--event-seconds", "4"]
    subprocess.run([*command, "collect", str(JOB), *counts, "--out", str(tmp_path / "c")], check=True)
    training = [*command, "train", str(tmp_path / "c"), "--out", str(tmp_path / "p")]
    assert watch(training, second_address, enough=lambda seen: False, seconds=600) == set()
    assert (tmp_path / "p").is_dir()
