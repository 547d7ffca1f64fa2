"""Models in files, as ``torch.export`` and ONNX write them: read as tensor steps, and as programs of their replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import Captured
from stepsight.dataset.kinds.op import check_sizes
from stepsight.dataset.tensors.exported_reader import open_exported
from stepsight.dataset.tensors.onnx_reader import open_onnx
from stepsight.dataset.tensors.ranks import (
    PRECISIONS,
    TensorStep,
    check_counts,
    ops_of,
    rank_of,
    with_backward,
    with_replicas,
)
from stepsight.dataset.tensors.readers import named

READERS = MappingProxyType({".onnx": open_onnx, ".pt2": open_exported})


@dataclass(frozen=True)
class ModelRequest:
    """The settings for reading a model file.

    Attributes:
        path: Of the file.
        replicas: Data-parallel ranks, each with a batch as large as the file's.
        local_size: Ranks of a node.
        training: Whether backward and optimizer follow the forward.
        dims: Sizes of symbolic dimensions.
        precision: Type of parameters and activations in floating point; empty: as in the file.
    """

    path: Path
    replicas: int = 1
    local_size: int = 8
    training: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    precision: str = ""

    def __post_init__(self) -> None:
        if not is_model(self.path) or not self.path.is_file():
            raise CaptureError(f"a model must be a file .onnx or .pt2, got {str(self.path)!r:.200}")
        check_counts(2**20, **{"world size": self.replicas, "devices per node": self.local_size})
        check_counts(2**31, **self.dims)
        if self.precision not in ("", *PRECISIONS):
            raise CaptureError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r:.40}")


def is_model(path: Path) -> bool:
    """Whether a file is a model by its name."""
    return path.suffix.lower() in READERS


def read_step(request: ModelRequest, *, whole: bool = True) -> TensorStep:
    """Read the forward of a model; raises ``CaptureError`` if the file is none.

    Args:
        request: Which, and how.
        whole: Whether a shape that is not known is an error, or only told.
    """
    with named(request.path.name):
        reader = READERS[request.path.suffix.lower()](request.path, request.dims)
        found = reader.read()
        step = TensorStep(**{**found, "dtype": request.precision or found["dtype"], "precision": request.precision})
        check_sizes((op for call in step.calls for op in ops_of(step, call)), "a model")
    for name, node in list(reader.unshaped.items())[:1]:
        if whole:
            raise CaptureError(f"shapes of all tensors must be known, got none of {name!r:.80} of {node!r:.80}")
        more = f"shapes from {node:.80} on are not known: {len(reader.unshaped)} tensors are taken as single numbers"
        step = replace(step, notes=(*step.notes, more))
    if whole and not step.outputs:
        raise CaptureError(f"a tensor program must compute its outputs, got {len(step.calls)} calls")
    return step


def read_model(request: ModelRequest) -> Captured:
    """Read a model as one step of one of its replicas; raises ``CaptureError`` if the file is no model."""
    step = read_step(request, whole=False)
    if not any(ops_of(step, call) for call in step.calls):
        raise CaptureError(f"{request.path.name} must compute something, got no op")
    with named(request.path.name):
        step = with_replicas(with_backward(step) if request.training else step, request.replicas)
        rank = rank_of(step, 0, request.local_size)
    name = f"{request.path.name} ({'training' if request.training else 'inference'})"
    return Captured(name, request.replicas, request.local_size, request.path.suffix[1:], (rank,))
