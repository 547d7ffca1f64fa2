"""The stages of a user's script: warm-up steps, timed ones without a profiler, then traced ones; and its world.

A script is one of the ranks that run here, or one of the real ranks of a world whose others do not run (see
``emulation.stand_in``).  It finds process groups, their rendezvous and annotated compiled functions.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from itertools import count, cycle
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from ..base import annotate, cores
from ..base.atomic_files import write_json
from ..base.collective_calls import STAND_IN, barrier
from ..base.patching import patch
from ..emulation.clocks import HostClock, Peers, Spinner, VirtualClock
from ..emulation.stand_in import World, asked_delays, enter
from ..measuring.timing import StepClock, StepTracer
from ..running.workers import FILE, PIPES, report
from .step_marks import StepMarks

RESULT = "script_rank{}.json"  # file that one rank writes when it has finished


class Stages:
    """Goes through the stages of a script on one rank; ``step_ended`` is called at the end of each of its steps.

    ``settings`` are ``warmup``, ``rounds``, ``steps`` (of each round), ``profile_steps`` and ``out``, where results go.
    ``leave`` ends the process when all is written.
    """

    def __init__(
        self, settings: dict[str, Any], rank: int, leave: Callable[[], None], world: EmulatedWorld | None
    ) -> None:
        self._settings, self.rank, self._leave, self._world = settings, rank, leave, world
        self._meet = barrier if world is None else world.meet  # waits for all ranks
        # Steps that are traced after the timed ones, with the profiler's warm-up; and all that a script must run.
        self.traced = settings["profile_steps"] + 1 if settings["profile_steps"] else 0
        self.needed = int(1 + settings["warmup"] + settings["rounds"] * settings["steps"] + self.traced)
        self._run: Generator[None] | None = None
        self.marks = StepMarks(self.step_ended, self._restart)

    def _restart(self) -> None:
        if self._run is not None:
            self._run.close()  # ends an open traced step
        self._run = None

    def step_ended(self) -> None:
        """The end of a step is the begin of the next one."""
        if self._run is None:
            self._run = self._measured()
        next(self._run, None)

    def _measured(self) -> Generator[None]:
        """Go through the stages, from the end of a step; every ``yield`` waits for the end of the next one.

        Then write this rank's measurements, and end the process after all ranks have finished.
        """
        wanted, world, rounds = self._settings, self._world, list[list[float]]()
        folder, collectives = Path(wanted["out"]), list[dict[str, Any]]()
        for number in range(wanted["warmup"]):
            if number:
                yield
            report(doing=f"warm-up step {number + 1}/{wanted['warmup']}", rank=self.rank)
        for number in range(wanted["rounds"]):
            report(doing=f"round {number + 1}/{wanted['rounds']}", rank=self.rank)
            self._meet()
            if number == 0 and world is not None:
                world.calls.clear()
            elif number == 0 and "box" not in wanted and "WORLD_SIZE" not in os.environ:
                cores.compute_in_real_time()
            clock = StepClock(device(), world.now if world is not None else time.perf_counter)
            clock.mark()
            for _ in range(wanted["steps"]):
                yield
                clock.mark()
            rounds.append(clock.seconds())
            if world is not None:
                collectives = world.collectives()
        profiled, names = list[float](), dict[str, str]()
        if self.traced:
            report(doing="traced steps", rank=self.rank)
            with StepTracer(device(), wanted["profile_steps"], folder, self.rank) as tracer:
                while tracer.left:
                    tracer.begin()
                    with annotate.segment("step"):
                        yield
                    tracer.end()
            profiled, names = tracer.written()
        digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names.values()}
        found = {
            "rank": self.rank, "steps_by": self.marks.kind, "device": device().type, "rounds": rounds,
            "profiled_seconds": profiled, "traces": names, "digests": digests, "threads": torch.get_num_threads(),
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
        }  # fmt: skip
        write_json(folder / RESULT.format(self.rank), found | ({} if world is None else {"collectives": collectives}))
        self._meet()
        self._leave()


def device() -> torch.device:
    """The device of the script."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


class EmulatedWorld:
    """The world of an emulated script, and its rank's communication.

    ``settings`` are ``ranks`` (the real ones), ``devices_per_node`` and ``virtual``.  Who started this process tells
    the delays of collectives.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        questions, answers = map(int, os.environ[PIPES].split(","))
        self._delay = asked_delays(os.fdopen(questions, "wb"), os.fdopen(answers, "rb"))
        self.clock = VirtualClock() if settings["virtual"] else HostClock()
        if isinstance(self.clock, VirtualClock):
            self.clock.install()
        self.calls = Counter[tuple[str, int, int, int]]()
        cuda = torch.cuda.is_available() and not settings["virtual"]
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        real, spinner = settings["ranks"], Spinner() if cuda else None
        store: Any = dist.FileStore(os.environ[FILE], len(real)) if len(real) > 1 else None  # type: ignore[attr-defined]
        self._peers = Peers(real, int(os.environ["RANK"]), "world", store) if len(real) > 1 else None
        enter(World(self.seconds, settings["devices_per_node"], device, self.clock, spinner, real=real, store=store))
        original = c10d._new_process_group_helper

        @functools.wraps(original)
        def in_this_world(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
            options |= {"backend_options": None, "device_id": None}
            return original(size, rank, ranks, dist.Backend(STAND_IN), *args, **options)

        patch(c10d, _new_process_group_helper=in_this_world)

    def seconds(self, *key: Any) -> float:
        """Seconds of one collective, which is counted."""
        self.calls[key] += 1
        return self._delay(*key)

    def now(self) -> float:
        """Time of the stream on which a step ends."""
        now = self.clock.now()
        return self.clock.main.time if isinstance(self.clock, VirtualClock) else now

    def meet(self) -> None:
        """Wait for the other real ranks; a virtual clock advances to their latest time."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._peers is not None:
            latest, _ = self._peers.agree(self.clock.now(), 0.0, "the end of a step")
            if isinstance(self.clock, VirtualClock):
                self.clock.wait_until(latest)

    def collectives(self) -> list[dict[str, Any]]:
        """What was counted: ``calls``, and the modelled ``seconds`` of each."""
        names = ("kind", "num_bytes", "group_size", "ranks_per_node")
        return [
            {**dict(zip(names, key, strict=True)), "calls": calls, "seconds": self._delay(*key)}
            for key, calls in self.calls.most_common()
        ]


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
        query = {"rank": os.environ.get("RANK", "0"), "world_size": os.environ.get("WORLD_SIZE", "1")}
        query |= dict(parse_qsl(urlparse(url).query))
        rank, size = int(query["rank"]), int(query["world_size"])
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

    def kept(options: dict[str, Any]) -> dict[str, Any] | None:
        given = {name for name, value in options.items() if value not in (None, False)}
        passed = {name: value for name, value in options.items() if name in ("fullgraph", "dynamic")}
        return passed if given <= {"backend", "fullgraph", "dynamic"} else None

    def annotate_region(region: Any, made: Any) -> None:
        """Wrap the compiled functions of a region."""
        call = getattr(made, "current_callable", None)
        space = getattr(call, "__globals__", None) or getattr(getattr(call, "__func__", None), "__globals__", {})
        told: dict[str, list[tuple[int, ...]]] = {}
        for launch, dims in zip(region.launches, region.dims, strict=True):
            told.setdefault(launch.call, []).append(dims)
        space.update({name: _annotated(space[name], told[name]) for name in told if callable(space.get(name))})

    def compile_(*args: Any, **kwargs: Any) -> Any:
        from ..regions.inductor import compiling_backend, replace_compile  # at the first call: it takes a second

        replace_compile(plain, lambda: compiling_backend(annotate_region), kept)
        return torch.compile(*args, **kwargs)

    patch(torch, compile=compile_)


def _annotated(kernel: Callable[..., Any], dims: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    """A compiled function; ``dims`` are those of its calls in a run of the region, in order."""
    turns = cycle(dims)

    def run(*arguments: Any) -> Any:
        with annotate.op(FUSED, next(turns), torch.float32):
            return kernel(*arguments)

    return run
