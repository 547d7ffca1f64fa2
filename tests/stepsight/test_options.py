"""Commands made of the signatures of functions and of dataclasses."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from stepsight.cli import app
from stepsight.cli.options import Answer, command
from stepsight.dataset.base.errors import StepsightError


@dataclass(frozen=True, kw_only=True)
class Base:
    """Some settings.

    Attributes:
        seed: Seed of the sampler.
    """

    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """More settings.

    Attributes:
        nodes: Numbers of nodes.
        factors: Factors by kind.
        name: Name of the study.
    """

    nodes: tuple[int, ...] = ()
    factors: dict[str, float] = field(default_factory=dict)
    name: Annotated[str, "--study", "-s"] = ""


SEVEN = Settings(seed=7)


def verb(job: Path, *, settings: Settings = SEVEN, fail: bool = False) -> Answer:
    """Do something.

    Args:
        job: Job file.
        fail: Fail after the answer.
    """
    return Answer({"job": str(job), "settings": vars(settings)}, "done", "it failed" if fail else None)


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(command(verb))
    return CliRunner().invoke(app, words)


def test_fields_are_options_and_defaults_are_those_of_an_instance() -> None:
    assert json.loads(run("a.toml", "--json").stdout)["settings"]["seed"] == 7
    factors = ("--factors", "gemm=2", "--factors", "a=b=0.5")
    told = json.loads(run("a.toml", "--json", "--nodes", "8, 16", *factors, "-s", "x", "--seed", "3").stdout)
    assert told["job"] == "a.toml"
    assert told["settings"] == {"seed": 3, "nodes": [8, 16], "factors": {"gemm": 2.0, "a=b": 0.5}, "name": "x"}


def test_help_has_the_meanings_of_docstrings() -> None:
    shown = " ".join(run("--help").stdout.split())
    for text in (
        "Do something.",
        "Job file.",
        "Seed of the sampler.",
        "Numbers of nodes.",
        "--study",
        "Print the answer",
    ):
        assert text in shown
    assert "Args:" not in shown and "--name" not in shown and "--no-fail" not in shown


def test_an_error_after_the_answer_is_exit_code_2() -> None:
    result = run("a.toml", "--fail")
    assert (result.exit_code, result.stdout) == (2, "done\n") and result.stderr == "error: it failed\n"


@pytest.mark.parametrize(
    ("option", "text"),
    [("--nodes", "8;16"), ("--nodes", ""), ("--factors", "gemm"), ("--seed", "9" * 400), ("--nodes", "9" * 5000)],
)
def test_other_texts_are_refused(option: str, text: str) -> None:
    assert isinstance(run("a.toml", option, text).exception, StepsightError)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400"])
def test_a_number_is_finite(text: str) -> None:
    done = CliRunner().invoke(app, ["search", "job.toml", "--timeout-s", text])
    assert f"--timeout-s must lie within +-1.8e+308, got {float(text)}" in str(done.exception)


def test_an_option_without_a_meaning_is_refused() -> None:
    def other(*, unknown: int = 1) -> Answer:
        """Do something else."""
        return Answer({}, "")

    with pytest.raises(AssertionError, match="unknown needs a meaning"):
        command(other)


def test_a_default_that_is_a_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults pass through the reader of an option too."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan-profile", "--hardware", "a100-sxm-80gb", "--json"])
    assert done.exit_code == 0 and list(tmp_path.glob("*.json")), done.output
