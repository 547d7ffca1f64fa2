"""Finished rounds survive on disk; damaged ones are measured again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import harness_jobs as jobs
import pytest

from stepsight.dataset.harness.base.atomic_files import write_json
from stepsight.dataset.harness.plan.plan_checks import check_plan
from stepsight.dataset.harness.running.launch import collect
from stepsight.dataset.harness.running.progress import (
    CERTAIN,
    Progress,
    least_certain,
    read_rounds,
    rounds_path,
    uncertainty,
)

EMPTY: dict[str, list[float]] = {"rounds": [], "losses": [], "records": []}
RUN = jobs.run("a", jobs.job(), rounds=3)  # two steps a round, after two of warm-up
STATE = {"rounds": [[0.1, 0.2], [0.1, 0.3]], "losses": [4.0, 3.0, 2.0, 1], "records": []}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_rounds(tmp_path, RUN) == EMPTY
    write_json(rounds_path(tmp_path, RUN["name"]), STATE)
    assert read_rounds(tmp_path, RUN) == STATE


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 10**5,
        "null",
        "[]",
        "{}",
        '{"rounds": 3, "losses": [], "records": []}',
        '{"rounds": [], "losses": [], "records": []}',
        *(
            json.dumps({**STATE, **change})
            for change in (
                {"rounds": [0.1, 0.2]},
                {"rounds": [[0.1, 0.2, 0.3]]},
                {"rounds": [[0.1, "x"]]},
                {"rounds": [[0.1, None]]},
                {"rounds": [[0.1, True]]},
                {"rounds": [[0.1, 0.0]]},
                {"rounds": [[0.1, float("nan")]]},
                {"losses": []},
                {"losses": [4.0, 3.0, 2.0, [1.0]]},
                {"records": None},
                {"records": [[]]},
                {"more": 1},
            )
        ),
        '{"rounds": [[0.1, 1e999]], "losses": [4, 3, 2, 1], "records": []}',
    ],
)
def test_damage_is_as_nothing(tmp_path: Path, text: str) -> None:
    rounds_path(tmp_path, "a").parent.mkdir()
    rounds_path(tmp_path, "a").write_text(text)
    assert read_rounds(tmp_path, RUN) == EMPTY


KEPT = {"rounds": [[1.5, 2.5]], "losses": [4.0, 3.0, 2.0, 1.0], "records": []}


@pytest.mark.parametrize(
    ("content", "kept"), [(json.dumps(KEPT).encode(), True), (b"\xff", False), (b'{"rounds": [["x"]]}', False)]
)
def test_a_collection_goes_on_past_damage(tmp_path: Path, content: bytes, kept: bool) -> None:
    """A run's rounds are kept if their file is whole, else it is measured from the first."""
    plan = check_plan(jobs.plan([jobs.run("a", jobs.job(), profile_steps=0)]))
    out = tmp_path / "out"
    rounds_path(out, "a").parent.mkdir(parents=True)
    rounds_path(out, "a").write_bytes(content)
    (out / "plan.json").write_text(json.dumps(plan))
    collect(plan, out, progress=False)
    manifest = json.loads((out / "runs/a/manifest.json").read_text())
    assert [len(seconds) for seconds in manifest["rounds"]] == [2, 2]
    assert len(manifest["losses"]) == 4
    assert (manifest["rounds"][:1] == KEPT["rounds"], manifest["losses"] == KEPT["losses"]) == (kept, kept)


def test_extra_time_goes_to_the_least_certain_run() -> None:
    """More rounds make a run more certain; a run that repeats within a percent needs none."""
    steady, wild = [[1.0, 1.001, 0.999]] * 2, [[1.0, 1.4, 0.9], [1.2, 1.6, 1.1]]
    assert least_certain({"steady": steady, "wild": wild, "unmeasured": []}) == "unmeasured"
    assert least_certain({"steady": steady, "wild": wild}) == "wild"
    assert least_certain({"steady": steady}) is None
    assert uncertainty(wild * 4) < uncertainty(wild)


def test_extra_seconds_become_rounds(tmp_path: Path) -> None:
    """A run whose times vary gets more rounds than planned, and all of them are in its manifest."""
    run = jobs.run("a", jobs.job(), rounds=2)
    collect(check_plan({"schema": 1, "runs": [run], "events": [], "extra_seconds": 0.5}), tmp_path, progress=False)
    rounds = json.loads((tmp_path / "runs" / "a" / "manifest.json").read_text())["rounds"]
    assert len(rounds) > 2 or uncertainty(rounds[:1]) <= CERTAIN


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_one_line_that_updates() -> None:
    stream = _Terminal()
    bar = Progress(4, stream=stream)
    bar.update("first", done=1)
    bar.close("end")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") == 2
    assert " 25% " in stream.getvalue()


def test_log_gets_plain_lines_now_and_then() -> None:
    stream = io.StringIO()
    bar = Progress(4, done=2, stream=stream)
    for _ in range(2):
        bar.update("work", done=1)
    bar.close("end")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("collect  75% ")
    assert lines[1].endswith("end")


def test_quiet_writes_nothing() -> None:
    stream = io.StringIO()
    bar = Progress(1, shown=False, stream=stream)
    bar.update("work", done=1)
    bar.close("end")
    assert stream.getvalue() == ""
