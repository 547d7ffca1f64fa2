"""What to install where a library is missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import EXTRAS, StepsightError, missing_extra, need

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def test_every_extra_is_one_of_the_package_and_brings_the_library() -> None:
    brought = {"sqlalchemy": "optuna", "plotly": "optuna"}  # by others
    for module, extra in EXTRAS.items():
        names = [re.split("[>=]", line)[0].replace("-", "_") for line in PROJECT["optional-dependencies"][extra]]
        assert brought.get(module, module) in names


def test_the_core_is_small() -> None:
    names = [re.split("[>=]", line)[0] for line in PROJECT["dependencies"]]
    assert names == ["msgspec", "numba", "numpy", "pyyaml", "safetensors", "typer"]


def test_a_missing_library_is_one_line() -> None:
    told = missing_extra(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"))
    assert told.endswith('not installed: pip install "stepsight[collect]", or "stepsight[all]"')
    assert missing_extra(ModuleNotFoundError("No module named 'abacus'", name="abacus")) == ""
    need("numpy")


def test_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepsight.dataset.base.errors.find_spec", lambda name: None)
    with pytest.raises(StepsightError, match=r"stepsight\[collect\]"):
        need("torch")


def test_a_message_is_short_whatever_a_library_said() -> None:
    for told in ("[1.0, 2.0], " * 500, "x" * 5000):
        assert len(str(StepsightError(f"a file must be whole, got {told}"))) <= 1500
