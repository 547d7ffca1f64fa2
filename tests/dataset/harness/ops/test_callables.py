"""Every op kind of the vocabulary can be measured by its signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.capturing.recorder import signature_of
from stepsight.dataset.harness.ops import composite, op_makers
from stepsight.dataset.harness.ops.callables import is_replayed, op_call, replayed_call
from stepsight.dataset.harness.ops.input_pool import Pool
from stepsight.dataset.kinds.op import OP_KINDS

DIMS = {
    "gemm": [8, 6, 4],
    "attention": [2, 4, 2, 8, 8, 4, 1],
    "norm": [8, 16],
    "reduce": [8, 16],
    "embedding": [8, 16, 32],
    "loss": [8, 32],
    "optimizer": [1000, 7],
    "elementwise": [96],
    "batched_gemm": [3, 8, 6, 4],
    "latent_attention": [2, 4, 8, 8, 6, 4, 1],
    "softmax": [8, 32],
    "permute": [17, 8, 4],
    "transfer": [96],
    "grouped_gemm": [3, 10, 6, 4],
    "host": [1000, 7],
    "batch_norm": [60, 8],
    "embedding_bag": [12, 8, 4, 32],
    "table_lookup": [40, 8, 10, 15, 3],
    "recurrent": [3, 2, 5, 4, 16],
}
CONV = [2, 4, 8, 36, 9, 1, 36, 2]  # 3 x 3 over 6 x 6


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(torch.device("cpu"), "fp32", numel=64)


@pytest.mark.parametrize("kind", [name for name, kind in OP_KINDS.items() if kind.in_harness and kind.family in DIMS])
def test_op_runs_twice_on_uneven_sizes(kind: str, pool: Pool) -> None:
    state = [1] if kind == "table_lookup_backward" else []  # elements of the optimizer's state of a row
    call = op_call(kind, [*DIMS[OP_KINDS[kind].family], *state], pool)
    for _ in range(2):
        call.run(*call.inputs())


@pytest.mark.parametrize(
    ("dims", "made"),
    [
        (CONV, (2, 8, 6, 6)),
        ([2, 4, 8, 9, 9, 1, 36, 2], (2, 8, 3, 3)),  # a stride of 2
        ([2, 1, 4, 36, 9, 4, 36, 2], (2, 4, 6, 6)),  # depthwise
        ([2, 4, 8, 64, 16, 1, 16, 2], (2, 8, 8, 8)),  # transposed
        ([2, 4, 8, 20, 3, 1, 20, 1], (2, 8, 20)),
        ([1, 4, 8, 64, 27, 1, 64, 3], (1, 8, 4, 4, 4)),
    ],
)
def test_a_convolution_makes_what_its_dims_say(dims: list[int], made: tuple[int, ...], pool: Pool) -> None:
    call = op_call("conv", dims, pool)
    assert call.run(*call.inputs()).shape == made
    for wanted in (0, 1):
        backward = op_call("conv_backward", [*dims, wanted], pool)
        assert (backward.run(*backward.inputs())[0] is not None) == bool(wanted)


def test_gemm_is_the_models_product(pool: Pool) -> None:
    """dims are the forward linear's: m rows, n outputs, k inputs; gradients swap them."""
    shapes = {}
    for kind in ("linear", "linear_dgrad", "linear_wgrad"):
        call = op_call(kind, [8, 6, 4], pool)
        shapes[kind] = tuple(call.run(*call.inputs()).shape)
    assert shapes == {"linear": (8, 6), "linear_dgrad": (8, 4), "linear_wgrad": (6, 4)}


@pytest.mark.parametrize("one_kernel", [False, True])
def test_a_grouped_product_is_the_products_of_its_groups(
    one_kernel: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 rows, three experts: 4, 3 and 3 of them; a loop and one kernel agree."""
    if one_kernel and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped product")
    monkeypatch.setattr(op_makers, "one_kernel", lambda *_: one_kernel)
    call = op_call("grouped_linear", [3, 10, 8, 4], pool)
    x, w = call.inputs()
    expected = torch.cat([rows @ matrix for rows, matrix in zip(x.split([4, 3, 3]), w, strict=True)])
    torch.testing.assert_close(call.run(x, w), expected)
    call = op_call("grouped_linear_dgrad", [3, 10, 8, 4], pool)
    grad, w = call.inputs()
    expected = torch.cat([rows @ matrix for rows, matrix in zip(grad.split([4, 3, 3]), w, strict=True)])
    torch.testing.assert_close(call.run(grad, w), expected)
    call = op_call("grouped_linear_wgrad", [3, 10, 8, 4], pool)
    grad, x = call.inputs()
    parts = zip(grad.split([4, 3, 3]), x.split([4, 3, 3]), strict=True)
    torch.testing.assert_close(call.run(grad, x), torch.stack([g.t() @ rows for g, rows in parts]))


def test_copies_come_back_to_their_rows(pool: Pool) -> None:
    """Two copies of every row, weighted: the gradients of the copies and of the weights are autograd's."""
    call = op_call("unpermute", [16, 8, 4], pool)
    x, weight = (part.clone().requires_grad_() for part in call.inputs())
    torch.manual_seed(0)
    y = op_call("unpermute", [16, 8, 4], pool).run(x, weight)
    assert tuple(y.shape) == (8, 4)
    grad = torch.ones_like(y)
    torch.manual_seed(0)
    found = op_call("unpermute_backward", [16, 8, 4], pool).run(grad, x, weight)
    expected = torch.autograd.grad(y, (x, weight), grad)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1].squeeze(1))


def test_gated_gelu_has_autograds_gradient(pool: Pool) -> None:
    gate_up = pool.take(8, 12).double().requires_grad_()
    grad = pool.take(8, 6).double()
    gate, up = gate_up.chunk(2, dim=-1)
    y = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(composite.geglu(gate_up.detach()), y.detach())
    torch.testing.assert_close(
        composite.geglu_backward(grad, gate_up.detach()), torch.autograd.grad(y, gate_up, grad)[0]
    )


@pytest.mark.parametrize(
    ("kind", "dims", "shape"),
    [
        ("attention", [2, 4, 2, 6, 6, 8, 0], (12, 32)),
        ("attention", [2, 4, 2, 6, 10, 8, 0], (12, 32)),
        ("mla_attention", [2, 4, 6, 10, 8, 4, 0], (12, 16)),
    ],
)
def test_attention_without_a_mask_takes_any_lengths(
    kind: str, dims: list[int], shape: tuple[int, int], pool: Pool
) -> None:
    call = op_call(kind, dims, pool)
    assert tuple(call.run(*call.inputs()).shape) == shape
    backward = op_call(f"{kind}_backward", dims, pool)
    assert len(backward.run(*backward.inputs())) == 3


@pytest.mark.parametrize("kind", ["linear", "linear_dgrad", "linear_wgrad"])
def test_a_product_in_fp8_has_the_shape_of_the_models(kind: str, pool: Pool) -> None:
    """And is the product of what it is given, in bf16."""
    narrow = Pool(torch.device("cpu"), "fp8", numel=64)
    call = op_call(kind, [32, 48, 64], narrow)
    a, b = call.inputs()
    y = call.run(a, b)
    wide = op_call(kind, [32, 48, 64], pool)
    assert y.shape == wide.run(*wide.inputs()).shape
    assert y.dtype == torch.bfloat16
    assert b.stride(0) == 1
    torch.testing.assert_close(y.float(), a.float() @ b.float(), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(("name", "kind"), [("fp8", "gelu"), ("tf32", "attention"), ("fp8", "tanh")])
def test_other_ops_than_products_are_refused_in_narrow_dtypes(name: str, kind: str) -> None:
    with pytest.raises(HarnessError, match=r"in .* measures linear, linear_dgrad, linear_wgrad|op kind must be"):
        op_call(kind, [8], Pool(torch.device("cpu"), name, numel=64))


def test_fp32_is_tf32_only_where_that_is_asked_for() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with op_makers.precision("tf32"):
        assert torch.backends.cuda.matmul.allow_tf32
        with op_makers.precision("fp32"):
            assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_optimizers_numbers_are_no_zeros(pool: Pool) -> None:
    step = op_call("adamw", [1000, 7], pool).run
    (group,) = step.__self__.param_groups  # type: ignore[attr-defined]
    assert all(p.abs().sum() > 0 and p.grad.abs().sum() > 0 for p in group["params"])


def test_pool_grows_and_rotates() -> None:
    pool = Pool(torch.device("cpu"), "fp32", numel=256)
    first, second = pool.take(8, 8), pool.take(8, 8)
    assert first.data_ptr() != second.data_ptr()
    assert pool.take(1000).numel() == 1000
    pool.clear()
    assert pool.take(8).abs().sum() > 0


def test_a_pool_is_several_times_a_gpus_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a call reads comes from memory."""
    monkeypatch.setattr("stepsight.dataset.harness.ops.input_pool._cache_bytes", lambda _: 1024)
    assert Pool(torch.device("cpu"), "bf16", numel=64)._block.nbytes == 8 * 1024


@pytest.mark.parametrize(
    ("kind", "dims", "text"),
    [
        ("tanh", [1], "op kind must be one of"),
        ("attention", [1, 1, 1, 8, 4, 4, 1], "q_len = kv_len"),
        ("mla_attention_backward", [1, 1, 8, 4, 6, 4, 1], "q_len = kv_len"),
        ("rope", [3], "even"),
        ("fp8 linear", [32, 24, 64], "multiples of 16, got 32, 24, 64"),
    ],
)
def test_unknown_op_is_refused(kind: str, dims: list[int], text: str, pool: Pool) -> None:
    if kind.startswith("fp8 "):
        pool = Pool(torch.device("cpu"), "fp8", numel=64)
    with pytest.raises(HarnessError, match=text):
        op_call(kind.removeprefix("fp8 "), dims, pool)


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


def test_lookups_have_the_rows_and_sums_of_their_dims(pool: Pool) -> None:
    """Whatever library looks them up: as many different rows as the op says, and a sum for each bag."""
    call = op_call("table_lookup", [60, 8, 12, 20, 4], pool)
    ids, offsets = call.inputs()
    assert len(ids) == 60 and len(offsets) == 13 and len(torch.unique(ids[:15])) == 5
    assert torch.as_tensor(call.run(ids, offsets)).numel() == 12 * 8
