"""The optimizer's step, on the device and on the host, and the norm of all gradients."""

from __future__ import annotations

from typing import Any

from stepsight.dataset.kinds.call_dims import tensors
from stepsight.dataset.kinds.op_kind import OpKind


def _over_tensors(name: str, family: str, code: int, flops: float, moved: float, **more: Any) -> OpKind:
    """A kind that iterates over tensors; ``flops`` and ``moved``: FLOP and elements moved per element."""
    return OpKind(
        name=name,
        family=family,
        dim_names=("numel", "tensors"),
        flops=lambda n, t: flops * n,
        elements=lambda n, t: moved * n,
        code=code,
        units=lambda n, t: t,
        **more,
    )


KINDS = (
    _over_tensors(
        "adamw", "optimizer", 10, 12.0, 7.0, calls={"aten::_fused_adamw_": tensors, "aten::_fused_adam_": tensors}
    ),
    _over_tensors("grad_norm", "optimizer", 11, 2.0, 1.0, calls={"aten::_foreach_norm": tensors}),
    _over_tensors("adamw_host", "host", 46, 12.0, 7.0, bound="host_memory", base=""),
)
