"""Contents of ``kernel.json`` and ``collective.json`` of a saved predictor besides their regressors."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.hardware.hardware import Hardware, hardware_from_dict
from stepsight.dataset.kinds import CollectiveKind, OpKind
from stepsight.features.host_call_features import CALL_FEATURES
from stepsight.features.named_columns import FEATURE_VERSION, check_version
from stepsight.training.collectives.between_nodes import BetweenNodes
from stepsight.training.collectives.collective_models import CollectiveModel
from stepsight.training.corrections.traced import TracedKind
from stepsight.training.kernels.derived_kinds import Ratio
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.kernels.kernel_models import KernelModel, num_axes
from stepsight.training.kernels.transferred import Transfer
from stepsight.training.predictor.predictor_manifest import read_part, texts, tree_text
from stepsight.training.regression.trees import Trees


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


KEY = "features"
Kinds = Mapping[str, OpKind] | Mapping[str, CollectiveKind]


def kind_of(label: str) -> str:
    """The kind in a regressor's label: ``linear`` of ``linear/fp8``."""
    return label.split("/")[0]


def described(labels: Iterable[str], terms: Sequence[str], kinds: Kinds) -> dict[str, Any]:
    """The saved description of a regressor's features.

    Args:
        labels: Of the measured kinds.
        terms: Names of the physical terms.
        kinds: Records by name.
    """
    measured = sorted(set(map(kind_of, labels)))
    codes = {name: kinds[name].code for name in measured}
    return {KEY: {"version": FEATURE_VERSION, "terms": list(terms), "codes": codes}}


def check_described(table: Mapping[str, Any], terms: Sequence[str], kinds: Kinds) -> None:
    """Check a saved regressor against this version; predictors without this description have version 1.

    Args:
        table: What was saved.
        terms: Names of the physical terms that this version computes.
        kinds: Records of the kinds that there are.

    Raises:
        PredictorError: If it reads other terms or features, or kinds that are not there or have other codes.
    """
    said = table.get(KEY, {})
    check_version(said.get("version", 1), "a regressor")
    if list(said.get("terms", terms)) != list(terms):
        raise PredictorError(
            f"a regressor must be fitted to the terms {', '.join(terms)}, got {', '.join(map(str, said['terms']))}: "
            "train the predictor again"
        )
    missing = sorted({kind_of(label) for label in table.get("physics", ())} - set(kinds))
    if missing:
        raise PredictorError(
            f"a predictor was trained on kinds that this version does not have: {', '.join(missing)}: register them "
            "(stepsight.dataset.kinds) or train the predictor again"
        )
    moved = [f"{name} {code} != {kinds[name].code}" for name, code in said.get("codes", {}).items()
             if name in kinds and code != kinds[name].code]  # fmt: skip
    if moved:
        raise PredictorError(
            f"codes of kinds must be those that the predictor was trained with, got {', '.join(moved)}: register the "
            "kinds with their former codes or train the predictor again"
        )


FILE = "host_calls.json"


def save_host_calls(host: HostCalls, folder: Path) -> None:
    """Write the files into the folder of a predictor."""
    files = {}
    for family, trees in host.trees.items():
        files[family] = f"host.{family}.txt.gz"
        (folder / files[family]).write_bytes(gzip.compress(trees.text.encode(), mtime=0))
    write_json(folder / FILE, {**host.to_dict(), "trees": files})


def load_host_calls(folder: Path) -> HostCalls | None:
    """Read the files that ``save_host_calls`` wrote; None if the predictor has none.

    Raises:
        PredictorError: If it is not that.
    """
    if not (folder / FILE).exists():
        return None

    def made(table: dict[str, Any]) -> HostCalls:
        trees = {family: Trees(tree_text(folder, file)) for family, file in table["trees"].items()}
        for each in trees.values():
            each.check(CALL_FEATURES)
        return HostCalls.from_dict(table, trees)

    return read_part(folder / FILE, made)
