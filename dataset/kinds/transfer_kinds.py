"""Transfers between a device and its host."""

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


KINDS = (_transfer("to_host", 37), _transfer("from_host", 38))
