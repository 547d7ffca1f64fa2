"""``show`` says what is there, or in one line why it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.errors import StepsightError
from stepsight.experiments.showing import describe
from tests.dataset.run_folders import write_events, write_run


def test_a_collection_and_what_it_lacks(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    write_events(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"runs": [{"name": "one"}, {"name": "two"}], "events": []}))
    shown = describe(tmp_path)
    (row,) = shown["runs"]
    assert (row["name"], row["ranks"], row["steps"], row["measured_s"]) == ("one", 2, 3, 1e-3)
    assert shown["events"] == {"ops-1": 2} and shown["absent"] == ["runs/two"]
    assert shown["text"].endswith("planned but absent: runs/two")


def test_a_predictor_that_was_set_aside(tmp_path: Path) -> None:
    (tmp_path / ".mine.x1" / "mine").mkdir(parents=True)
    with pytest.raises(StepsightError, match=r"mine is missing: .* comes back with: mv"):
        describe(tmp_path / "mine")


def test_a_run_by_kinds(tmp_path: Path) -> None:
    shown = describe(write_run(tmp_path, 2))
    assert shown["kinds"]["all_reduce"]["calls"] == 2 and "2 rank(s)" in shown["text"]


@pytest.mark.parametrize(
    "changes",
    [{"rounds": []}, {"rounds": [[]]}, {"rounds": "fast"}, {"world_size": "1"}, {"role": "a\nb"}, {"name": None}],
)
def test_a_damaged_run_is_one_line_that_names_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = write_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text()) | changes
    (run / "manifest.json").write_text(json.dumps(manifest))
    for path in (run, tmp_path):
        with pytest.raises(StepsightError, match=r"^.*manifest\.json$"):
            describe(path)


@pytest.mark.parametrize("value", [{"heldout": 3}, {"heldout": []}, {"heldout": [{}]}])
def test_a_damaged_summary_is_one_line(tmp_path: Path, value: dict[str, Any]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(value))
    with pytest.raises(StepsightError, match=r"^.*summary\.json must be the summary of a demo, .*$"):
        describe(tmp_path)
