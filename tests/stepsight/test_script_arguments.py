"""Which words of a command line are the script's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stepsight.cli import app as stepsight_app
from stepsight.cli.scripts import WORDS, ScriptCommand
from stepsight.dataset.base.errors import StepsightError

app = typer.Typer()


@app.command(cls=ScriptCommand)
def command(
    context: typer.Context, script: str = "", nproc_per_node: str = "", out: str = "", as_json: bool = False
) -> None:
    """Print what came."""
    typer.echo(json.dumps([script, nproc_per_node, out, as_json, context.meta.get(WORDS)]))


def parsed(line: str) -> Any:
    result = CliRunner().invoke(app, line.split())
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--out R --script t.py --lr 0.1", ["t.py", "", "R", False, ["--lr", "0.1"]]),
        ("--script t.py --lr 0.1 --out R", ["t.py", "", "R", False, ["--lr", "0.1"]]),
        ("--script=t.py x --out R --as-json", ["t.py", "", "", False, ["x", "--out", "R", "--as-json"]]),
        ("--out R --script t.py --out theirs", ["t.py", "", "R", False, ["--out", "theirs"]]),
        ("--out R --nproc_per_node=2 --standalone --script t.py", ["t.py", "2", "R", False, []]),
        ("--script --rdzv-backend c10d --nproc-per-node 2 --nnodes=1 t.py --out x", ["t.py", "2", "x", False, []]),
        ("--out R", ["", "", "R", False, None]),
    ],
)
def test_what_follows_the_file_is_the_scripts(line: str, found: list[Any]) -> None:
    assert parsed(line) == found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--script", "--script takes a Python file"),
        ("--script --lr 3", "--script takes a Python file"),
        ("--script -m train", "torchrun's -m"),
        ("--nnodes 2 --script t.py", "--nnodes must be 1"),
    ],
)
def test_what_cannot_be_collected_is_refused(line: str, message: str) -> None:
    with pytest.raises(StepsightError, match=message):
        parsed(line)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("capture SCRIPT --world-size 8", "--world-size"),
        ("capture --world-size 8 SCRIPT -o cap", "-o"),
        ("emulate SCRIPT --world-size=8", "--world-size"),
        ("emulate --world-size 8 SCRIPT --fabric dgx-h100", "--fabric"),
        ("collect --script SCRIPT --out runs --steps 3", "--out"),
    ],
)
def test_an_option_after_the_script_is_told_of(line: str, option: str, tmp_path: Path) -> None:
    """An option of stepsight that the script got is named where the verb lacks it, with where it belongs."""
    (tmp_path / "s.py").touch()
    result = CliRunner().invoke(stepsight_app, line.replace("SCRIPT", str(tmp_path / "s.py")).split())
    verb = line.partition(" ")[0]
    told = f"options of `stepsight {verb}` come before the script, which gets {option}"
    assert isinstance(result.exception, StepsightError) and str(result.exception).endswith(told)


@pytest.mark.parametrize("line", ["capture SCRIPT --tp 8", "emulate --world-size 8 --fabric nosuch SCRIPT --tp 8"])
def test_other_errors_say_nothing_of_where_options_belong(line: str, tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    result = CliRunner().invoke(stepsight_app, line.replace("SCRIPT", str(tmp_path / "s.py")).split())
    assert result.exit_code != 0 and "before the script" not in f"{result.output} {result.exception}"
