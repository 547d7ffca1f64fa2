"""Durations of a host's calls in the folder of a predictor: ``host_calls.json`` and LightGBM's text by family."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from stepsight.dataset.base.files import write_json
from stepsight.features.host_call_features import CALL_FEATURES
from stepsight.training.kernels.host_calls import HostCalls
from stepsight.training.predictor.predictor_manifest import read_part, tree_text
from stepsight.training.regression.trees import Trees

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
