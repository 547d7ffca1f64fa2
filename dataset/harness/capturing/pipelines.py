"""Pipeline stages of ``torch.distributed.pipelining`` without their neighbours.

A stage asks its neighbours for the shapes of what they send.  What a stage gets is what the first stage of its pipeline
sends on: if that is on another rank, the request must hold it (``boundary``), and ``NeedsBoundary`` says whom to ask.
Gradients have the shapes of the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import stage as _stage
from torch.distributed.pipelining._utils import (
    _derive_grad_metas,
    _StageBackwardMeta,
    _StageForwardMeta,
    _TensorMeta,
)

from .patching import patch
from .recorder import Recorder

_stages: Any = _stage

Boundary = list[dict[str, Any]]  # of each tensor that passes between stages: shape, stride, dtype, requires_grad


class NeedsBoundary(BaseException):
    """Raised if a stage needs to know the output of the first stage, which is on another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"needs what rank {rank} sends to the next stage")
        self.rank = rank


class FoundBoundary(BaseException):
    """Raised after the output of this stage, if nothing else is requested."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__("found what passes between stages")
        self.boundary = boundary


def install(recorder: Recorder, boundary: Boundary | None, *, only_boundary: bool) -> list[Boundary]:
    """Give stages the shapes of their neighbours.

    Args:
        recorder: For notes.
        boundary: What passes between stages, if it is known.
        only_boundary: Stop as soon as it is known here.

    Returns:
        What passes between stages, in a list that is empty until it is known.
    """
    known: list[Boundary] = [] if boundary is None else [boundary]

    def send_meta(self: Any, meta: Any, to: int) -> None:
        if not isinstance(meta, _StageForwardMeta):
            return
        sent = [_described(each) for each in meta.forward_metas]
        if only_boundary:
            raise FoundBoundary(sent)
        if not known:
            known.append(sent)
        elif known[0] != sent:
            recorder.note(f"stage {self.stage_index} sends other shapes than stage 0: {sent} after {known[0]}")

    def receive_meta(self: Any, of: int) -> Any:
        if of > self.stage_index:
            return _StageBackwardMeta(backward_metas=_derive_grad_metas(self._stage_meta.outputs))
        if not known:
            raise NeedsBoundary(self._resolve_peer_global_rank(0))
        return _StageForwardMeta(forward_metas=tuple(_TensorMeta(**_restored(each)) for each in known[0]))

    patch(_stages.PipelineStage, _send_meta=send_meta, _recv_meta=receive_meta)
    patch(_stages.PipelineStage, _warmup_forward_vote=_vote, _warmup_backward_result=_result)
    return known


def _vote(self: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
    """Whether this stage states all shapes itself (1) or asks its neighbours (0): the others do as it does."""
    asks = _stages.InferenceMode.needs_dynamic(self._user_meta, has_backward)
    self._captured_vote = torch.tensor([0 if asks else 1], dtype=torch.int32)
    vote: torch.Tensor = self._captured_vote
    return vote


def _result(self: Any, received_result: Any = None) -> torch.Tensor:
    vote: torch.Tensor = self._captured_vote
    return vote


def _described(meta: Any) -> dict[str, Any]:
    if type(meta) is not _TensorMeta:
        raise RuntimeError("stages that pass DTensors on cannot be captured: pass local tensors (`to_local`)")
    dtype = str(meta.dtype).removeprefix("torch.")
    return {
        "shape": list(meta.shape), "stride": list(meta.stride), "dtype": dtype, "requires_grad": meta.requires_grad
    }  # fmt: skip


def _restored(sent: dict[str, Any]) -> dict[str, Any]:
    return {
        "shape": torch.Size(sent["shape"]),
        "stride": tuple(sent["stride"]),
        "dtype": getattr(torch, sent["dtype"]),
        "requires_grad": sent["requires_grad"],
    }
