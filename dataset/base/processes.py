"""Names of processes by which others on the same machine know whether they still run."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_name(pid: int | None = None) -> str:
    """Host, number and start of a process (this one by default): the kernel uses numbers again."""
    number = os.getpid() if pid is None else pid
    try:
        began = Path(f"/proc/{number}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except OSError:
        began = "gone"
    return f"{_machine()} {number} {began}"


def _machine() -> str:
    """Name of this machine, which may be that of another one too, with the number of its start and of its processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8")[:8]
        space = Path("/proc/self/ns/pid").stat().st_ino  # containers number their processes apart
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}/{space}"


def is_gone(name: str) -> bool:
    """Whether a named process ran on this machine and has ended; other machines' processes are not known."""
    words = name.split()
    here = len(words) == 3 and words[0] == _machine() and words[1].isdigit()
    return here and process_name(int(words[1])) != name
