"""How ranks find each other: through a file on one machine, at a given address on several nodes.

Nothing listens beyond the loopback interface, beyond a box's own network, or beyond the user's address, and nothing
that arrives is unpickled.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan_error import HarnessError

if TYPE_CHECKING:
    import torch

FILE = "STEPSIGHT_RENDEZVOUS"  # environment variable: the file through which the ranks of one machine meet
_PATIENCE = timedelta(minutes=10)
_ADDRESS_OF = 0x8915  # ioctl SIOCGIFADDR
_BACKLOG = 4096  # connections that may wait: one of every rank


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
    """Join the process group of all ranks; the environment names this rank and the address of the others.

    Args:
        backend: ``gloo`` or ``nccl``.
        device: This rank's GPU, with ``nccl``.
    """
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    file = os.environ.get(FILE)
    store: Any
    if file:
        store = dist.FileStore(file, size)  # type: ignore[attr-defined]
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _bind_to(_interface_to(host, port))
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


def _bind_to(interface: str) -> None:
    """Make collectives use one interface, unless the user chose others."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _interface_to(host: str, port: int) -> str:
    """The network interface by which this machine reaches an address, or the user's choice.

    Raises:
        HarnessError: If none is found.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return os.environ["GLOO_SOCKET_IFNAME"]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    found = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no address
                    continue
                if found[20:24] == own or own[0] == found[20] == 127:
                    return name
        raise OSError("no interface has the address from which it is reached")
    except OSError as error:
        raise HarnessError(
            f"set GLOO_SOCKET_IFNAME to the interface by which nodes reach MASTER_ADDR {host}: none was found ({error})"
        ) from None
