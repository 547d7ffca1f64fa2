"""The work of jobs stays as it is on record."""

import json
from typing import Any

import pytest

from tests.simulator.programs.recorded_programs import ALL, RECORD, values

KNOWN: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))


@pytest.mark.parametrize("name", ALL)
def test_work_is_as_on_record(name: str) -> None:
    """Ops, collectives, segments and time; ``recorded_programs`` says when to record anew."""
    found = json.loads(json.dumps(values(ALL[name])))
    for table in ("work", "segments", "order", "flops"):
        assert found[table] == KNOWN[name][table], f"{table} of {name}"
    assert found["seconds"] == pytest.approx(KNOWN[name]["seconds"], rel=1e-12)
    assert found["breakdown"] == pytest.approx(KNOWN[name]["breakdown"], rel=1e-9, abs=1e-15)


def test_jobs_on_record_are_those_that_are_listed() -> None:
    assert list(KNOWN) == list(ALL)
