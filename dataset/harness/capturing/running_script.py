"""Runs a user's script as one rank of a fake world, and writes down one of its steps.

A request is a JSON object: ``script``, ``arguments``, ``rank``, ``world_size``, ``local_size``, ``warm_up``,
``device`` (``cuda``, or ``cpu``: the host computes), ``parent`` (the process to end with) and ``out``, the file to
write; for stages of a pipeline
``boundary`` and ``only_boundary`` (``distributed``).  What is written is a JSON object: either ``error`` with the
script's line, or the record.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..base.atomic_files import parse_json
from ..base.cores import die_with
from ..base.errors import own_place
from . import distributed, fake_device
from .fake_tensors import FakeWorld
from .recorder import Recorder
from .sharded_tables import install_tables


def main() -> None:
    """Run what a request says: ``python -m harness.capturing.running_script request.json``."""
    request = parse_json(Path(sys.argv[1]).read_text("utf-8"))
    die_with(request["parent"])
    with Path(request["stack"]).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)  # who has waited too long asks where this is
        faulthandler.enable(stack, all_threads=False)  # where a signal kills it
        _write(request, run(request))
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)


def _write(request: dict[str, Any], record: dict[str, Any]) -> None:
    Path(request["out"]).write_text(json.dumps(record), "utf-8")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a script until its step is written down; returns the record, or what went wrong."""
    script, on_host, recorder = Path(request["script"]), request["device"] == "cpu", Recorder()
    distributed.set_environment(request["rank"], request["world_size"], request["local_size"])
    fake = FakeWorld(recorder, script)
    if not on_host:
        fake_device.install_device(request["local_size"], recorder)
    distributed.install_world(request["rank"], request["world_size"], fake.collectives)
    fake_device.install_corrections(fake, on_host=on_host)
    install_tables()
    only_boundary = request.get("only_boundary", False)
    boundary = distributed.install_pipelines(recorder, request.get("boundary"), only_boundary=only_boundary)
    steps = Steps(fake, request, boundary)
    sys.argv = [str(script), *request["arguments"]]
    sys.path.insert(0, str(script.resolve().parent))
    torch.set_num_threads(1)
    ended: BaseException | None = None
    try:
        with contextlib.nullcontext() if on_host else fake_device.DevicesOnCpu(), fake.fake, fake:
            runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        ended = error
    if steps.done:
        return steps.record()
    if isinstance(ended, distributed.Found):
        return ended.record
    record = {"error": "few steps", "line": "", "steps": steps.seen, "trace": "", "notes": list(recorder.notes)}
    if ended is not None and (not isinstance(ended, SystemExit) or ended.code):
        record["error"] = f"{type(ended).__name__}: {ended}"[:2000]
        record["line"] = own_place(traceback.extract_tb(ended.__traceback__), script)
        record["trace"] = "".join(traceback.format_exception(ended))[-20000:]
    return record


class Steps:
    """Starts the recording after ``warm_up`` steps, and ends the script a step later.

    Where the script catches the exception that ends it and goes on, the step is written, and the process ends.
    """

    def __init__(self, world: FakeWorld, request: dict[str, Any], boundary: list[distributed.Boundary]) -> None:
        self._world, self._request, self._boundary = world, request, boundary
        self._marker: Any = None  # the optimizer whose steps count
        self.seen, self.done = 0, False
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._world.in_optimizer += 1

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._world.in_optimizer -= 1
        if self._world.in_optimizer:
            return  # within the step of another optimizer, as ZeRO's
        if self._marker is None:
            self._marker = optimizer
        if optimizer is not self._marker:
            return
        if self.done:
            _write(self._request, self.record())
            os._exit(0)
        self.seen += 1
        if self._world.recorder.active:
            self.done, self._world.recorder.active = True, False
            raise distributed.Found
        self._world.recorder.active = self.seen >= self._request["warm_up"]

    def record(self) -> dict[str, Any]:
        """What was written down, as plain values."""
        request, recorder, collectives = self._request, self._world.recorder, self._world.collectives
        return {
            **{name: request[name] for name in ("rank", "world_size", "device")},
            **{name: list(getattr(recorder, name)) for name in ("works", "names", "streams", "notes")},
            **{"torch": torch.__version__, "boundary": self._boundary[0] if self._boundary else None},
            **{"nodes": recorder.nodes, "live_bytes": recorder.live_bytes, "issued": collectives.issued},
            "exchanged": list(collectives.exchanged.items()),
            "edges": [[*ends, why] for ends, why in recorder.edges.items()],
            "groups": [[name, list(ranks)] for ranks, (_, name) in collectives.groups.items()],
        }


if __name__ == "__main__":
    main()
