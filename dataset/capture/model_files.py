"""Models in files, as ``torch.export`` and ONNX write them, instead of a captured script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from stepsight.dataset.base.errors import CaptureError, StepsightError
from stepsight.dataset.capture.captured import Captured
from stepsight.dataset.capture.model_readers import read_exported, read_onnx
from stepsight.dataset.capture.model_steps import ModelSteps, rank_of_model
from stepsight.dataset.kinds.op import Op, check_sizes

READERS = MappingProxyType({".onnx": read_onnx, ".pt2": read_exported})
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class ModelRequest:
    """The settings for reading a model file.

    Attributes:
        path: Of the file.
        replicas: Data-parallel ranks.
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
        if not self.path.is_file():
            raise CaptureError(f"the model must be a file, got {str(self.path)!r:.200}")
        if not 1 <= self.replicas <= 2**20 or not 1 <= self.local_size <= 1024:
            raise CaptureError(
                f"--world-size must lie within 1 and {2**20} and --devices-per-node within 1 and 1024, got "
                f"{self.replicas} and {self.local_size}"
            )
        if self.precision not in ("", *PRECISIONS):
            raise CaptureError(f"--precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r:.40}")
        for name, size in self.dims.items():
            if not 1 <= size <= 2**31:
                raise CaptureError(f"--dims must be sizes of at least 1, got {name}={size}")


def is_model(path: Path) -> bool:
    """Whether a file is a model by its name."""
    return path.suffix.lower() in READERS


def read_model(request: ModelRequest) -> Captured:
    """Read a model as one step of one of its replicas; raises ``CaptureError`` if the file is no model."""
    try:
        model = READERS[request.path.suffix.lower()](request.path, request.dims)
        if not model.steps:
            raise CaptureError(f"{request.path.name} must compute something, got no op")
        check_sizes((step.op for step in model.steps), "a model")
        if request.training and not model.parameters:
            raise CaptureError(f"{request.path.name} must have parameters to be trained, got none: use --inference")
        if request.precision:
            model = _in_precision(model, request.precision)
        rank = rank_of_model(model, request.replicas, request.local_size, training=request.training)
    except StepsightError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CaptureError(
            f"{request.path.name} must be a whole model: {type(error).__name__}: {error!s:.200}"
        ) from None
    name = f"{request.path.name} ({'training' if request.training else 'inference'})"
    return Captured(name, request.replicas, request.local_size, request.path.suffix[1:], (rank,))


def _in_precision(model: ModelSteps, precision: str) -> ModelSteps:
    """The same model with another floating-point type."""
    steps = [
        replace(step, op=Op(step.op.kind, step.op.dims, precision)) if step.op.dtype in PRECISIONS else step
        for step in model.steps
    ]
    return replace(model, steps=tuple(steps), dtype=precision)
