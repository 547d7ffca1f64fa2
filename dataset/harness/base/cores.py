"""Which cores a rank computes on, and that it ends with its parent.

The thread that computes stays on one core; the threads that communicate (gloo's) may run on any.  Measured on two
cores: with nothing else running both ways are equal, but beside one other process a small all-reduce took 7 ms
with everything on the rank's core and 0.5 ms with free communication threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DEATH_SIGNAL = 1
_real_time = False
_ALLOWED = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def die_with(parent: int) -> None:
    """Make the kernel kill the calling process when its parent, numbered as before the fork, ends for any reason."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os._exit(1)


def pin(local_rank: int) -> None:
    """Keep the calling thread on the rank's core, where the platform can; threads made from now on stay there too."""
    if _ALLOWED:
        cores = sorted(_ALLOWED)
        os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


def unpin() -> None:
    """Let the calling thread run on every core that the process was given."""
    if _ALLOWED:
        os.sched_setaffinity(0, _ALLOWED)


def compute_in_real_time() -> None:
    """Let the calling thread go before all others of the machine from now on, where that is allowed.

    For a process that computes alone: one that polls for others would keep them from running.
    """
    with suppress(AttributeError, PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def may_hurry() -> bool:
    """Whether the calling thread may run in real time: containers often keep it from that, even root."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def hurry_communication() -> None:
    """Have threads that communicate run in real time from now on, where that is allowed, as many ranks share a core.

    Not so the thread that computes: gloo's calls may spin for a moment, which in real time would keep the kernel from
    moving the very packets that it waits for.
    """
    global _real_time
    _real_time = may_hurry()


def go_first() -> None:
    """Have the calling thread go before other processes' ordinary threads, where that is allowed."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)


@contextmanager
def any_core(*, messages: bool = False) -> Iterator[None]:
    """Threads made within are those that communicate: they may run on every core that the process was given.

    ``messages``: for point-to-point messages, which gloo writes from the thread that computes; its own thread tries
    again and again for the lock that this one holds meanwhile, so it must not keep it from running.
    """
    if not _ALLOWED:
        yield
        return
    hurry, mine = _real_time and not messages, os.sched_getaffinity(0)
    os.sched_setaffinity(0, _ALLOWED)
    if hurry:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
        if hurry:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
