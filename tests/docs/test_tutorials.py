"""The tutorials work: each block runs in order, in a folder that holds the examples alone.

A block with a title is a file of that name. In ``console`` blocks the lines that begin with ``$`` are commands.
``<!-- not executed: why -->`` before a block excuses it.  ``make docs`` runs these tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepsight.cli import app

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'^(<!-- not executed: [^\n]+ -->\n)?```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


class Block(NamedTuple):
    skipped: bool
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(bool(why), language, title, text) for why, language, title, text in BLOCK.findall(page.read_text())]


def run_command(line: str) -> None:
    """Run one command: the stepsight ones in this process, which is quicker."""
    program, *arguments = shlex.split(line, comments=True)
    if program == "stepsight":
        found = [str(path) for word in arguments for path in (sorted(Path().glob(word)) if "*" in word else [word])]
        assert app(found, standalone_mode=False) in (None, 0), line
        return
    if program == "cd":
        os.chdir(*arguments)  # the test's monkeypatch goes back
        return
    assert program == "python", f"a tutorial runs stepsight, python or cd, got {line}"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.tutorial
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader copies works, in the order of the page."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {"__name__": page.stem}
    found = blocks(page)
    assert found, "a tutorial has blocks to run"
    for block in found:
        if block.skipped:
            continue
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, f"{page.name}", "exec"), names)
        elif block.language == "console":
            for line in re.findall(r"^\$ (.*)$", block.text, re.M):
                run_command(line)
