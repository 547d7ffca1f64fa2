"""Kernels of attention are chosen by CUDA's rules, not by those of the CPU on which a script is captured."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.harness.capturing.fake_tensors import _Call

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
LENGTH, WIDTH = 16, 64


def call(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH, heads: int = 4, **more: Any) -> _Call:
    q = torch.empty(2, 4, LENGTH, width, dtype=dtype)
    k = v = torch.empty(2, heads, more.pop("keys", LENGTH), width, dtype=dtype)
    given = {"mask": None, "dropout_p": 0.0, "is_causal": False, "gqa": False}
    return _Call(q, k, v, **{**given, **more})


def mask(*shape: int, dtype: torch.dtype = torch.bfloat16, learnt: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=learnt)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (call(), FLASH),
        (call(is_causal=True, dropout_p=0.1), FLASH),
        (call(width=256), FLASH),
        (call(width=20), FLASH),  # padded
        (call(heads=2, gqa=True), FLASH),
        (call(torch.float32), EFFICIENT),
        (call(width=512), EFFICIENT),
        (call(mask=mask(LENGTH, LENGTH)), EFFICIENT),
        (call(mask=mask(4, LENGTH, LENGTH)), EFFICIENT),
        (call(torch.float32, mask=mask(4, LENGTH, LENGTH, dtype=torch.float32, learnt=True)), EFFICIENT),
        (call(is_causal=True, keys=8), EFFICIENT),
        (call(torch.float64), MATH),
        (call(torch.float32, width=18), MATH),
        (call(torch.float32, heads=2, gqa=True), MATH),
        (call(mask=mask(LENGTH, LENGTH).t().contiguous().t()), MATH),
    ],
)
def test_the_first_kernel_that_takes_a_call_is_chosen(asked: _Call, chosen: SDPBackend) -> None:
    assert asked.backend()[0] == chosen


def test_a_script_chooses_kernels() -> None:
    with sdpa_kernel(EFFICIENT):
        assert call().backend()[0] == EFFICIENT
    with sdpa_kernel(CUDNN):
        assert call(mask=mask(LENGTH, LENGTH)).backend()[0] == CUDNN
        with pytest.raises(
            RuntimeError, match=r"no kernel that the script allows takes this attention: .* at most 128"
        ):
            call(width=256).backend()
    with sdpa_kernel([MATH, FLASH], set_priority=True):
        assert call().backend()[0] == MATH


SCRIPT = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    bias = torch.nn.Parameter(torch.zeros(3, {length}, {length}, device="cuda"))
    qkv = torch.nn.Linear(192, 576).cuda()
    optimizer = torch.optim.SGD([bias, *qkv.parameters()], 0.1)
    for step in range(3):
        x = torch.randn(2, {length}, 192, device="cuda")
        q, k, v = qkv(x).unflatten(-1, (3, 3, {width})).permute(2, 0, 3, 1, 4)
        scaled_dot_product_attention(q, k, v, bias).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_learnt_bias_goes_to_the_fused_kernel_padded(tmp_path: Path) -> None:
    """Its rows are padded to 200 keys, its gradient is a sum over the batch; attention is not causal by default."""
    script = tmp_path / "vit.py"
    script.write_text(textwrap.dedent(SCRIPT.format(length=197, width=64)), "utf-8")
    (rank,) = capture(CaptureRequest(script, (), 1)).ranks
    found = {work.kind: work.dims for work in rank.graph.works if "attention" in work.kind}
    assert found == dict.fromkeys(("attention", "attention_backward"), (2, 3, 3, 197, 197, 64, 0))
    assert ["aten::constant_pad_nd", [[3, 197, 197]]] in [[each[0], each[1][:1]] for each in rank.calls]
    assert not rank.graph.warnings


def test_the_math_path_is_told_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "vit.py"
    text = SCRIPT.format(length=16, width=64).replace('device="cuda")', 'device="cuda", dtype=torch.float64)')
    script.write_text(textwrap.dedent(text.replace(".cuda()", ".cuda().double()")), "utf-8")
    (rank,) = capture(CaptureRequest(script, (), 1)).ranks
    (told,) = rank.graph.warnings
    assert told.startswith("vit.py:10 takes the math path of attention") and told.endswith("got float64")
