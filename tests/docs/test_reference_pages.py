"""The generated pages of the documentation: nothing of the specs and of the parser is missing."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer

from stepsight.cli import app
from stepsight.dataset.job.specs import SECTIONS

pytest.importorskip("mkdocs", reason="the pages are made where mkdocs is installed (make setup)")
HOOK = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "hooks" / "reference_pages.py"))


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_of_a_job_file_is_explained(name: str) -> None:
    """The docstring of a spec has a meaning for each of its fields, and for nothing else."""
    meanings = HOOK["meanings"](SECTIONS[name])
    keys = [field.name for field in dataclasses.fields(SECTIONS[name])]
    assert [key for key in keys if not meanings.get(key)] == []
    page = HOOK["job_files_page"]()
    section = page.partition(f"## `[{name}]`")[2].partition("\n## ")[0]
    assert [key for key in keys if f"| `{key}` |" not in section] == []


def test_every_verb_has_a_section() -> None:
    group: Any = typer.main.get_command(app)
    page = HOOK["command_line_page"]()
    assert [name for name in group.commands if f"## stepsight {name}\n" not in page] == []
    assert page.count("`--json`") >= len(group.commands) - 1  # `experiment` has those of its studies
