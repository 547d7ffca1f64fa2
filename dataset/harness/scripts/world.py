"""PyTorch as a user's script finds it: its process groups and their rendezvous, and annotated compiled functions.

A script is one of the ranks that run here, or one of the real ranks of a world whose others do not run (see
``emulation.stand_in``).
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from ..base import annotate, cores
from ..base.collective_calls import STAND_IN
from ..base.patching import patch
from ..emulation.clocks import HostClock, Peers, RealClock, Spinner, VirtualClock
from ..emulation.stand_in import AskedDelays, DelayModel, World, enter
from ..running.workers import FILE
from .launch import PIPES


class EmulatedWorld:
    """The world of an emulated script, and its rank's communication.

    ``settings`` are ``ranks`` (the real ones), ``devices_per_node`` and ``virtual``.  Without
    ``delays`` of collectives, who started this process tells them.
    """

    def __init__(self, settings: dict[str, Any], delays: DelayModel | None = None) -> None:
        self._delays = delays or _asked()
        self.clock: HostClock = RealClock()
        if settings["virtual"]:
            virtual = VirtualClock()
            virtual.install()
            self.clock = virtual
        self._calls: Counter[tuple[str, int, int, int]] = Counter()
        cuda = torch.cuda.is_available() and not settings["virtual"]
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        real: list[int] = settings["ranks"]
        spinner = Spinner() if cuda else None
        store = None
        self._peers: Peers | None = None
        if len(real) > 1:
            store = dist.FileStore(os.environ[FILE], len(real))  # type: ignore[attr-defined]
            self._peers = Peers(real, int(os.environ["RANK"]), "world", store)
        enter(World(self, settings["devices_per_node"], device, self.clock, spinner, real=real, store=store))
        original = c10d._new_process_group_helper

        @functools.wraps(original)
        def in_this_world(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
            options |= {"backend_options": None, "device_id": None}
            return original(size, rank, ranks, dist.Backend(STAND_IN), *args, **options)

        patch(c10d, _new_process_group_helper=in_this_world)

    def seconds(self, kind: str, num_bytes: int, group_size: int, ranks_per_node: int) -> float:
        """Seconds of one collective, which is counted."""
        self._calls[kind, num_bytes, group_size, ranks_per_node] += 1
        return self._delays.seconds(kind, num_bytes, group_size, ranks_per_node)

    def now(self) -> float:
        """Time of the stream on which a step ends."""
        if isinstance(self.clock, VirtualClock):
            self.clock.now()
            return self.clock.main.time
        return self.clock.now()

    def meet(self) -> None:
        """Wait for the other real ranks; a virtual clock advances to their latest time."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._peers is not None:
            latest, _ = self._peers.agree(self.clock.now(), 0.0, "the end of a step")
            if isinstance(self.clock, VirtualClock):
                self.clock.wait_until(latest)

    def forget(self) -> None:
        """Reset the counts of collectives."""
        self._calls.clear()

    def collectives(self) -> list[dict[str, Any]]:
        """What was counted: ``calls``, and the modelled ``seconds`` of each."""
        names = ("kind", "num_bytes", "group_size", "ranks_per_node")
        return [
            {**dict(zip(names, key, strict=True)), "calls": calls, "seconds": self._delays.seconds(*key)}
            for key, calls in self._calls.most_common()
        ]


def _asked() -> AskedDelays:
    questions, answers = map(int, os.environ[PIPES].split(","))
    return AskedDelays(os.fdopen(questions, "wb"), os.fdopen(answers, "rb"))


def rendezvous_alone() -> None:
    """Make ``init_process_group`` of a script wait for no other rank."""

    def handler(url: str, **_: Any) -> Any:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        raise RuntimeError("an emulated rank cannot connect to other ranks: they do not run")

    _rendezvous_handlers.update(dict.fromkeys(("env", "tcp", "file"), handler))
    patch(dist, _verify_params_across_processes=lambda *args: None)  # DDP would gather every rank's tensors in a list


def rendezvous_through_file() -> None:
    """Have ``init_process_group`` of a script meet through the harness' file, and its threads leave the rank's core.

    PyTorch's own ``env://`` and ``tcp://`` listen on every address of the machine.
    """
    times = count(1)  # a store of its own for each time that a script starts its process groups

    def handler(url: str, timeout: timedelta = timedelta(minutes=10), **_: Any) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(query.get("rank", os.environ.get("RANK", 0)))
        size = int(query.get("world_size", os.environ.get("WORLD_SIZE", 1)))
        store: Any = dist.FileStore(os.environ[FILE], size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        yield dist.PrefixStore(f"script{next(times)}", store), rank, size  # type: ignore[attr-defined]
        raise RuntimeError("ranks of a script meet once for each process group")

    _rendezvous_handlers.update(dict.fromkeys(("env", "tcp"), handler))
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def on_any_core(*args: Any, **kwargs: Any) -> Any:
        with cores.any_core():
            return original(*args, **kwargs)

    patch(c10d, _new_process_group_helper=on_any_core)


FUSED = "fused_loops"


def annotate_compiled() -> None:
    """Annotate calls of functions that ``torch.compile`` makes for a CPU from now on, so that traces tell what they do.

    A call of a compiled function is an op ``fused_loops`` with the amounts that its code does.  Other backends, modes
    and options stay as they are.
    """
    plain = torch.compile

    def compile_(*args: Any, **kwargs: Any) -> Any:
        from ..regions.inductor import compiling_backend, replace_compile  # at the first call: it takes a second

        replace_compile(plain, lambda: compiling_backend(_annotate), _kept)
        return torch.compile(*args, **kwargs)

    patch(torch, compile=compile_)


def _kept(options: dict[str, Any]) -> dict[str, Any] | None:
    given = {name for name, value in options.items() if value not in (None, False)} - {"backend"}
    plain = given <= {"fullgraph", "dynamic"}
    return {name: options[name] for name in ("fullgraph", "dynamic") if name in options} if plain else None


def _annotate(region: Any, made: Any) -> None:
    """Wrap the compiled functions of a region."""
    from ..regions.loop_code import region_dims

    call = getattr(made, "current_callable", None)
    space = getattr(call, "__globals__", None) or getattr(getattr(call, "__func__", None), "__globals__", {})
    told: dict[str, list[tuple[int, ...]]] = {}
    for launch, dims in zip(region.launches, region_dims(region), strict=True):
        told.setdefault(launch.call, []).append(dims)
    for name, calls in told.items():
        if callable(space.get(name)):
            space[name] = _Annotated(space[name], calls)


class _Annotated:
    """A compiled function, and the dims of its calls in a run of the region, in order."""

    def __init__(self, kernel: Callable[..., Any], dims: Sequence[tuple[int, ...]]) -> None:
        self._kernel, self._dims, self._turn = kernel, dims, 0

    def __call__(self, *arguments: Any) -> Any:
        dims = self._dims[self._turn % len(self._dims)]
        self._turn += 1
        with annotate.op(FUSED, dims, torch.float32):
            return self._kernel(*arguments)
