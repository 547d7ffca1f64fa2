"""Calls that are made from their signatures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepsight.dataset.harness.base.plan_error import HarnessError
from stepsight.dataset.harness.capturing.recorder import signature_of
from stepsight.dataset.harness.ops.op_replayed import is_replayed, replayed_call

_ATEN = torch.ops.aten
_X = torch.rand(4, 8, 6, 6)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (_ATEN.mm.default, (torch.rand(4, 6), torch.rand(8, 6).t()), {}),
        (_ATEN.add.Tensor, (_X, torch.rand(6)), {"alpha": 2}),
        (_ATEN.sum.dim_IntList, (_X, [0, 2]), {"dtype": torch.float64}),
        (_ATEN.convolution.default, (_X, torch.rand(3, 8, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1), {}),
        (_ATEN.cat.default, ([_X, _X], 1), {}),
        (_ATEN.index_select.default, (_X, 1, torch.tensor([7, 0])), {}),
        (_ATEN.max_pool2d_with_indices.default, (_X, [2, 2], [2, 2]), {}),
        (_ATEN.embedding.default, (torch.rand(50, 8), torch.tensor([[49, 3]])), {}),
        (_ATEN.clone.default, (_X.permute(0, 2, 3, 1),), {"memory_format": torch.contiguous_format}),
    ],
)
def test_a_call_comes_back_from_its_signature(function: Any, args: Any, kwargs: Any) -> None:
    """Shapes and types of the result are those of the call that was written down."""
    made = function(*args, **kwargs)
    first = made if isinstance(made, torch.Tensor) else made[0]
    signature = signature_of(function, args, kwargs, [first])
    again = replayed_call(signature, torch.device("cpu")).run()
    again = again if isinstance(again, torch.Tensor) else again[0]
    assert (again.shape, again.dtype, again.stride()) == (first.shape, first.dtype, first.stride())


def test_only_calls_of_pytorch_are_made() -> None:
    for name in ("os::system", "aten::mkldnn_rnn_layer", "aten::no such"):
        assert not is_replayed(name)
        with pytest.raises(HarnessError, match="calls of PyTorch ops that read no values"):
            replayed_call((name, [], [], [], [], []), torch.device("cpu"))
    with pytest.raises(HarnessError, match="has no aten::mm that takes 1"):
        replayed_call(("aten::mm", [[2, 2]], ["float"], [[2, 1]], [""], []), torch.device("cpu"))
