"""Calls of compiled functions in traces."""

from __future__ import annotations

import pytest
import torch

from stepsight.dataset.harness.base import annotate
from stepsight.dataset.harness.scripts import stages as world


def test_each_call_of_a_compiled_function_is_annotated_with_its_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a region calls twice has the dims of its first call, of its second, and of the first again."""
    said: list[tuple[int, ...]] = []

    def op(kind: str, dims: tuple[int, ...], dtype: torch.dtype) -> torch.profiler.record_function:
        said.append(dims)
        return torch.profiler.record_function(kind)

    monkeypatch.setattr(annotate, "op", op)
    kernel = world._annotated(lambda x: x + 1, [(1, 2), (3, 4)])
    assert [kernel(number) for number in range(3)] == [1, 2, 3]
    assert said == [(1, 2), (3, 4), (1, 2)]


def test_other_backends_and_modes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Inductor's usual way is annotated."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda model=None, **options: calls.append(options))
    world.annotate_compiled()
    torch.compile(torch.nn.ReLU(), backend="eager")
    torch.compile(torch.nn.ReLU(), mode="max-autotune")
    assert calls == [{"backend": "eager"}, {"mode": "max-autotune"}]
