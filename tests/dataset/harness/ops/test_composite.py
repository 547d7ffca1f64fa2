"""Composite ops agree with PyTorch's own, forward and backward."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import harness_jobs as jobs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.models import torch_parts as tensor_parallel
from stepsight.dataset.harness.models.transformer import BUCKETS, relative_buckets
from stepsight.dataset.harness.ops import composite
from stepsight.dataset.harness.running.launch import collect


def _same_gradients(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(theirs, inputs, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), expected)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_a_cast_gives_its_gradient_the_first_type(x: Tensor) -> None:
    y = composite.cast(x, torch.bfloat16)
    assert y.dtype == torch.bfloat16 and composite.cast(x, x.dtype) is x
    _same_gradients(composite.cast(y, torch.float32), x.to(torch.bfloat16).float(), x)


def test_rms_norm(x: Tensor) -> None:
    weight = torch.linspace(0.5, 2.0, 16, requires_grad=True)
    _same_gradients(composite.RMSNorm.apply(x, weight), F.rms_norm(x, (16,), weight, composite.EPSILON), x, weight)


def test_swiglu(x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    _same_gradients(composite.SwiGLU.apply(x), F.silu(gate) * up, x)


def test_rope_rotates_queries_and_keys_and_leaves_values(x: Tensor) -> None:
    cos, sin = composite.rope_tables(3, 4, x.device, x.dtype)
    heads = x.view(2, 3, 4, 4)
    first, second = heads[:, :, :3, :2], heads[:, :, :3, 2:]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    expected = torch.cat([rotated, heads[:, :, 3:]], dim=2).view(6, 16)
    _same_gradients(composite.Rope.apply(x * 1.0, cos, sin, 3), expected, x)


def test_cross_entropy(x: Tensor) -> None:
    targets = torch.tensor([0, 3, 15, 7, 7, 1])
    _same_gradients(tensor_parallel.CrossEntropy.apply(x, targets, None, 0.5), 0.5 * F.cross_entropy(x, targets), x)


def test_shards_of_a_vocabulary_make_up_the_whole(x: Tensor) -> None:
    """Row sums and targets' logits of two halves add up, once both use the common maximum."""
    targets = torch.tensor([0, 3, 15, 7, 8, 1])
    whole = composite.cross_entropy(x, targets, 0)
    halves = [composite.cross_entropy(part, targets, first) for part, first in zip(x.split(8, 1), (0, 8), strict=True)]
    total = sum(each[1] * (each[2] - whole[2]).exp() for each in halves)
    torch.testing.assert_close(total, whole[1])
    torch.testing.assert_close(halves[0][3] + halves[1][3], whole[3])


CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Composites are on; what the compiler was given to compile, which then runs as it is."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        found.append(graph)
        return graph

    monkeypatch.setattr(composite, "BACKEND", backend)
    monkeypatch.setattr(composite._Compiling, "active", True)
    yield found
    torch.compiler.reset()


@composite.composite
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

    monkeypatch.setattr(composite, "BACKEND", backend)
    with pytest.raises(HarnessError, match=r"compile needs a compiler .* no g\+\+ here"):
        composite.enable_compiling(CPU)
    assert not composite._Compiling.active
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
        losses.append(manifest["losses"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


BATCH, HEADS, DIM, LENGTH, KV_LENGTH = 2, 3, 4, 5, 7


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), requires_grad=True)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    """Of ``[length, batch, heads, dim]`` each; ``[rows, heads * dim]``."""
    weights = torch.softmax(torch.einsum("qbhd,kbhd->bhqk", q, k) + bias, -1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).reshape(q.shape[0] * BATCH, -1)


def _same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(theirs, inputs, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), expected)


def test_self_attention_with_a_bias() -> None:
    qkv, bias = _random(LENGTH * BATCH, HEADS * 3 * DIM), _random(HEADS, LENGTH, LENGTH)
    parts = qkv.view(LENGTH, BATCH, HEADS, 3, DIM).unbind(3)
    _same(composite.SelfAttention.apply(qkv, bias, BATCH), _plain(*parts, bias), qkv, bias)


def test_cross_attention() -> None:
    q, kv = _random(LENGTH * BATCH, HEADS * DIM), _random(KV_LENGTH * BATCH, HEADS * 2 * DIM)
    parts = q.view(LENGTH, BATCH, HEADS, DIM), *kv.view(KV_LENGTH, BATCH, HEADS, 2, DIM).unbind(3)
    _same(composite.CrossAttention.apply(q, kv, HEADS, BATCH), _plain(*parts, 0.0), q, kv)


def test_relative_bias_looks_up_and_hides_what_comes_later() -> None:
    table, bucket = _random(BUCKETS, HEADS), relative_buckets(LENGTH, causal=True)
    bias = composite.RelativeBias.apply(table, bucket, True)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert bool((bias[:, ~seen] == -torch.inf).all())
    expected = table[bucket].permute(2, 0, 1)
    _same(composite.RelativeBias.apply(table, bucket, False), expected, table)


def test_near_distances_have_a_bucket_each_and_far_ones_share() -> None:
    """Raffel et al. 2019: half of the buckets are exact, the rest logarithmic; two directions where all is seen."""
    causal, both = (relative_buckets(300, causal=causal) for causal in (True, False))
    assert causal[16, :17].flip(0).tolist() == list(range(17))
    assert int(causal[299, 0]) == BUCKETS - 1
    assert int(both[0, 1]) == BUCKETS // 2 + 1
    assert int(both.max()) == BUCKETS - 1


def test_relu_and_geglu_are_pytorchs() -> None:
    x = _random(6, 16)
    gate, up = x.chunk(2, dim=-1)
    _same(composite.ReLU.apply(x), torch.relu(x), x)
    _same(composite.GeGLU.apply(x), torch.nn.functional.gelu(gate, approximate="tanh") * up, x)
