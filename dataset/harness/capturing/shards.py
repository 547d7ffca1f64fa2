"""FSDP cuts each parameter into one chunk for each rank and keeps its own: here no other is made.

For each parameter that is sharded already it joins two meshes, which lists all ranks: here each pair is joined once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param

from .patching import patch


class Chunks(Sequence[Tensor]):
    """Chunks of a tensor as ``torch.chunk`` makes them, with empty ones at the end; each is made when it is asked for.

    Args:
        tensor: What is cut.
        count: Number of chunks.
        dim: Along which dimension.
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._size = -(-tensor.shape[dim] // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> Tensor:  # type: ignore[override]
        if not 0 <= at < self._count:
            raise IndexError(at)
        begin, length = at * self._size, self._tensor.shape[self._dim]
        if begin >= length:
            return self._tensor.new_empty(0)
        return torch.narrow(self._tensor, self._dim, begin, min(self._size, length - begin))


def install() -> None:
    """Let FSDP cut parameters and join meshes in this way."""
    patch(_fsdp_param, _chunk_with_empty=Chunks)
    join: Any = DeviceMesh._concatenate
    joined: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}  # meshes are held, so that ids stay theirs

    def joined_once(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in joined:
            joined[key] = meshes, join(meshes)
        return joined[key][1]

    patch(DeviceMesh, _concatenate=staticmethod(joined_once))
