"""Every study has one entry, and its options are parsed alike."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.experiments.studies import runner
from stepsight.experiments.studies.study import Study


def test_the_command_lists_the_studies() -> None:
    told = CliRunner().invoke(app, ["experiment", "--help"]).output
    assert all(f"\n  {name} " in told for name in runner.STUDIES)


@pytest.mark.parametrize("name", runner.STUDIES)
def test_every_study_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.STUDIES[name].main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and f"stepsight experiment {name}" in told and "--json" in told


def test_the_list_has_one_line_for_each_study() -> None:
    """However many paragraphs say what it measures: the first sentence alone."""
    listed = CliRunner().invoke(app, ["experiment"]).output.partition("Studies:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(runner.STUDIES)
    assert not any("``" in line or ". " in line for line in listed)


def test_help_keeps_paragraphs_apart(capsys: pytest.CaptureFixture[str]) -> None:
    about = "Compare ``a``\nwith b. More of it.\n\n    stepsight experiment it --json\n\nThe end.\n"
    study = Study("it", about, lambda options: ({}, ""))
    with pytest.raises(SystemExit):
        study.main(["--help"])
    text = "\n\nCompare `a` with b. More of it.\n\n    stepsight experiment it --json\n\nThe end.\n\n"
    assert text in capsys.readouterr().out and study.summary == "Compare `a` with b"


NUMBERS = [
    (name, flag)
    for name, study in runner.STUDIES.items()
    for flag, how in study.options.items()
    if how.get("type") in (int, float)
]


@pytest.mark.parametrize(("name", "flag"), NUMBERS)
@pytest.mark.parametrize("text", ["-1", "x"])
def test_a_number_of_a_study_has_a_rule(name: str, flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A negative number of folds or seeds once ended in a traceback, after the data were read."""
    needed = [word for key, how in runner.STUDIES[name].options.items() if how.get("required") for word in (key, "x")]
    assert runner.STUDIES[name].main([*needed, flag, text]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and told.err.count("\n") == 1 and flag in told.err


def test_parts_that_hold_nothing_out_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, text in (("--folds", "1"), ("--seeds", "0")):
        assert runner.STUDIES["context"].main([flag, text]) == 2
        assert f"{flag} must be a number >= " in capsys.readouterr().err
