import json
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.graph.program import Program, ProgramBuilder
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.gnn.context_model import ContextModel
from stepsight.gnn.context_table import ContextTable, load_context

HARDWARE = find_hardware("local-cpu")
assert HARDWARE is not None
TABLE = ContextTable(2.0, {("", ""): 0.1, ("linear", ""): 0.2, ("linear", "backward"): 0.4, ("add", ""): 9.0})


def _program() -> Program:
    builder = ProgramBuilder("backward")
    for work in (Op("linear", (64, 64, 32), "fp32"), Op("gelu", (64,), "fp32"), Op("add", (64,), "fp32")):
        builder.add(work)
    builder.add(Collective("all_reduce", 4096, 2, 2), "dp")
    return builder.build()


def test_entries_of_all_nodes_of_the_kind_and_of_the_phase_add_up() -> None:
    found = TABLE.log_correction(_program(), np.full(4, 1e-4), HARDWARE, 1)
    assert found == pytest.approx([0.7, 0.1, 2.0, 0.1])


def test_a_saved_table_answers_as_before(tmp_path: Path) -> None:
    assert load_context(tmp_path) is None
    TABLE.save(tmp_path)
    assert load_context(tmp_path) == TABLE


@pytest.mark.parametrize(
    "value", [{"schema": 2}, {"bound": 0}, {"bound": "1"}, {"logs": [["add", ""]]}, {"logs": [["add", "", 1e9]]},
              {"logs": [["add", "", float("nan")]]}, {"logs": 3}],
)  # fmt: skip
def test_a_broken_table_is_refused(tmp_path: Path, value: dict[str, object]) -> None:
    TABLE.save(tmp_path)
    path = tmp_path / "context_table.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **value}))
    with pytest.raises(PredictorError, match=r"context_table\.json"):
        load_context(tmp_path)


def test_a_predictor_has_one_context_model(tmp_path: Path) -> None:
    TABLE.save(tmp_path)
    ContextModel().weights().save(tmp_path)
    with pytest.raises(PredictorError, match="one context model"):
        load_context(tmp_path)
