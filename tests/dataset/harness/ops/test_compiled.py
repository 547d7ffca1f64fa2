"""Composites run compiled where that is asked for, each shape once, in whatever thread."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import harness_jobs as jobs
import pytest
import torch
from torch import Tensor

from stepsight.dataset.harness.base.plan_error import HarnessError
from stepsight.dataset.harness.ops import compiled, composite
from stepsight.dataset.harness.running.launch import collect

CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Composites are on; what the compiler was given to compile, which then runs as it is."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        found.append(graph)
        return graph

    monkeypatch.setattr(compiled, "BACKEND", backend)
    monkeypatch.setattr(compiled._State, "active", True)
    yield found
    torch.compiler.reset()


@compiled.composite
def _twice(x: Tensor, first: int) -> Tensor:
    return x * 2 + first


def test_every_shape_is_compiled_once_and_none_is_left_to_run_as_written(graphs: list[torch.fx.GraphModule]) -> None:
    """PyTorch itself gives up on a function after eight shapes, in silence; so here there are more of them."""
    for _ in range(2):
        for size in range(1, 25):
            assert torch.equal(_twice(torch.ones(size), 3), torch.full((size,), 5.0))
    assert len(graphs) == 24
    _twice(torch.ones(3), 4)
    assert len(graphs) == 25


def test_another_thread_may_meet_a_shape_first(graphs: list[torch.fx.GraphModule]) -> None:
    """As autograd's on a GPU."""
    threads = [threading.Thread(target=_twice, args=(torch.ones(size), 7)) for size in range(30, 42)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(graphs) == 12


@pytest.mark.parametrize("name", ["swiglu_backward", "geglu_backward"])
def test_what_is_compiled_instead_gives_the_same(name: str, graphs: list[torch.fx.GraphModule]) -> None:
    function = getattr(composite, name)
    grad, gate_up = torch.randn(5, 6), torch.randn(5, 12)
    torch.testing.assert_close(function(grad, gate_up), function.__wrapped__(grad, gate_up))
    assert len(graphs) == 1


def test_a_missing_compiler_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: object) -> None:
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(compiled, "BACKEND", backend)
    with pytest.raises(HarnessError, match=r"compile needs a compiler .* no g\+\+ here"):
        compiled.enable(CPU)
    assert not compiled._State.active
    torch.compiler.reset()


@pytest.mark.skipif("STEPSIGHT_COMPILE" not in os.environ, reason="compiles for half a minute: set STEPSIGHT_COMPILE=1")
def test_a_compiled_collection_says_so(tmp_path: Path) -> None:
    """Really compiled: a run and an op, with the losses of the same run as written."""
    job = jobs.job({"layers": 1}, micro_batch=8)
    runs = [jobs.run("a", job, rounds=1, profile_steps=1)]
    ops = [{"kind": "swiglu", "dims": [512], "dtype": "fp32"}]
    plan = jobs.plan(runs, [{"name": "one", "world_size": 1, "ops": ops, "collectives": [], "seconds": 0.1}])
    losses = []
    for place, extra in (("written", {}), ("compiled", {"compile": True})):
        collect({**plan, **extra}, tmp_path / place, progress=False)
        manifest = json.loads((tmp_path / place / "runs/a/manifest.json").read_text())
        events = json.loads((tmp_path / place / "events/one.json").read_text())
        assert [each.get("compile", False) for each in (manifest, events)] == 2 * [bool(extra)]
        assert events["records"][0]["op"] == ops[0]
        assert set(manifest["took_seconds"]) == {"build", "steps", "profile"}
        losses.append(manifest["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
