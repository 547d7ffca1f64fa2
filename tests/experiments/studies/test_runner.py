"""Every study has one entry, and its options are parsed alike."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.experiments.studies import runner


def test_the_command_lists_the_studies() -> None:
    told = CliRunner().invoke(app, ["experiment", "--help"]).output
    assert all(f"\n  {name} " in told for name in runner.STUDIES)


@pytest.mark.parametrize("name", runner.STUDIES)
def test_every_study_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runner.STUDIES[name].main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and f"stepsight experiment {name}" in told and "--json" in told
