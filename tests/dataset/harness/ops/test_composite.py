"""Composite ops agree with PyTorch's own, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stepsight.dataset.harness.models import torch_parts as tensor_parallel
from stepsight.dataset.harness.ops import composite


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
