"""What a machine can do."""

import json
from typing import Any

import pytest

from stepsight.cli import app
from stepsight.experiments.tasks.machine import check_machine, machine_text


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    told: dict[str, Any] = check_machine()
    assert told["cores"] > 0 and told["can"]["predict, explain, search, evaluate"] == ""
    text = machine_text(told)
    assert "what works here" in text and "torch" in text
    app(["doctor", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["libraries"].keys() == told["libraries"].keys()
