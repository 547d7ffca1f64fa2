"""Composite ops of the harness' own models: an op that it annotates is one node, as in its traces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import annotate
from .fake_tensors import FakeWorld
from .patching import patch
from .recorder import OP
from .signatures import COMPOSITE


class _Composite:
    """Everything inside is one op; collectives inside are separate nodes."""

    def __init__(self, world: FakeWorld, signature: tuple[Any, ...]) -> None:
        self._world, self._signature = world, signature

    def __enter__(self) -> None:
        self._outer, self._world.composite = self._world.composite, ([], [], [])

    def __exit__(self, *error: Any) -> None:
        reads, writes, scopes = self._world.composite or ([], [], [])
        self._world.composite = self._outer
        if self._outer is not None:
            for mine, theirs in zip(self._outer, (reads, writes, scopes), strict=True):
                mine.extend(theirs)
        elif writes:
            recorder = self._world.recorder
            work = recorder.work(self._signature)
            recorder.add((OP, work, -1, self._signature[1]), reads, writes, scopes[0])


def install(world: FakeWorld) -> None:
    """Make annotations of the harness record composite ops."""

    def op(kind: str, dims: Iterable[int], dtype: torch.dtype) -> _Composite:
        return _Composite(world, (COMPOSITE, kind, tuple(dims), annotate.DTYPE_NAMES[dtype]))

    patch(annotate, op=op)
