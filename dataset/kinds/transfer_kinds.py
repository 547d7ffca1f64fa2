"""Transfers between a device and its host, and calls of the host that a device waits for."""

from __future__ import annotations

from stepsight.dataset.kinds.op_kind import OpKind


def _transfer(name: str, code: int) -> OpKind:
    return OpKind(
        name=name,
        family="transfer",
        dim_names=("numel",),
        flops=lambda n: 0.0,
        elements=lambda n: float(n),
        bound="host_link",
        code=code,
        base="",
    )


HOST_CALLS = OpKind(
    name="host_calls",
    family="host_calls",
    dim_names=("calls",),
    flops=lambda n: 0.0,
    elements=lambda n: 0.0,
    bound="host",
    in_harness=False,
    units=lambda n: float(n),
    base="",
)

KINDS = (_transfer("to_host", 37), _transfer("from_host", 38), HOST_CALLS)
