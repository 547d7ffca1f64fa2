"""Contents of ``kernel.json`` and ``collective.json`` of a saved predictor besides their regressors."""

from __future__ import annotations

from typing import Any

from stepsight.dataset.hardware.hardware import Hardware, hardware_from_dict
from stepsight.training.collectives.between_nodes import BetweenNodes
from stepsight.training.collectives.collective_models import CollectiveModel
from stepsight.training.corrections.traced import TracedKind
from stepsight.training.kernels.derived_kinds import Ratio
from stepsight.training.kernels.kernel_models import KernelModel, num_axes
from stepsight.training.kernels.transferred import Transfer
from stepsight.training.predictor.predictor_manifest import texts


def kernel_more(kernel: KernelModel) -> dict[str, Any]:
    table: dict[str, Any] = {"derives": kernel.derives}
    table["ratios"] = {kind: ratio.to_dict() for kind, ratio in kernel.ratios.items()}
    if kernel.serves is not None:
        table["measured_on"] = kernel.hardware.to_dict()
    if kernel.software:
        table["software"] = {label: list(names) for label, names in kernel.software.items()}
    if isinstance(kernel.transfer, Transfer):
        table["transfer"] = kernel.transfer.to_dict()
    if kernel.traced:
        table["traced"] = {label: kind.to_dict() for label, kind in kernel.traced.items()}
    return table


def measured_hardware(hardware: Hardware, table: dict[str, Any]) -> Hardware:
    """The device whose ops were measured: the predictor's own, or one with the same chip."""
    return hardware_from_dict(table["measured_on"]) if "measured_on" in table else hardware


def traced_kinds(table: dict[str, Any]) -> dict[str, TracedKind]:
    """Read corrections from traces that ``kernel_more`` wrote; none if no traces calibrated the predictor."""
    found = table.get("traced", {}).items()
    return {label: TracedKind.from_dict(kind, num_axes(label)) for label, kind in found}


def derived(table: dict[str, Any]) -> tuple[bool, dict[str, Ratio]]:
    """Read the result of ``kernel_more``."""
    return _flag(table, "derives"), {kind: Ratio.from_dict(ratio) for kind, ratio in table["ratios"].items()}


def collective_more(collective: CollectiveModel) -> dict[str, Any]:
    table = {"nccl": collective.nccl, "carried": list(collective.carried)}
    return table if collective.between is None else {**table, "between": collective.between.to_dict()}


def library(table: dict[str, Any]) -> tuple[bool, tuple[str, ...], BetweenNodes | None]:
    """Read the result of ``collective_more``; a predictor without it was trained on one host's messages."""
    between = BetweenNodes.from_dict(table["between"]) if "between" in table else None
    return "nccl" in table and _flag(table, "nccl"), tuple(texts(table.get("carried", []), "carried")), between


def _flag(table: dict[str, Any], key: str) -> bool:
    if not isinstance(table[key], bool):
        raise ValueError(f"{key} must be true or false, got {table[key]!r:.80}")
    return bool(table[key])
