"""Write the outputs of commands in README.md and in the documentation anew: ``python -m tests.docs.refresh_outputs``.

It runs the quick commands that have an output on the page (``COMMANDS``, on files of ``examples/``), in a folder that
holds the examples and the files of the page: titled ones, and those that it shows with ``cat``.  A line that the page
cuts with ``...`` stays cut; after a line ``...`` the page shows only lines that begin as its own do.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from stepsight import StepsightError, predict
from stepsight.cli import app

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/tutorials/*.md",
    "docs/how-to/cost.md",
    "docs/how-to/search.md",
    "docs/how-to/report.md",
    "stepsight/__init__.py",
    "training/prediction/ask_many.py",
)
COMMANDS = ("predict", "explain", "search", "compare", "sweep")
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
_TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.M | re.S)
_SHOWN = re.compile(r"^\$ cat (\S+)\n((?:(?!\$ |```).*\n)*)", re.M)
_STEP = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)

_ANSWER = re.compile(r"Prediction\([^()\n]*gpt3-175b on 1024 x a100-sxm-80gb\)")


def main() -> int:
    """Write every page whose outputs have changed; print which."""
    answer = repr(predict(ROOT / "examples" / "gpt3-175b-1024.toml"))
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        text = page.read_text()
        fresh = _ANSWER.sub(answer, renewed(text))
        if fresh != text:
            page.write_text(fresh)
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


def renewed(text: str) -> str:
    """The text of a page with the outputs of its commands as they are now."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for name, content in (*_TITLED.findall(text), *_SHOWN.findall(text)):
            (Path(folder) / name).write_text(content)
        with contextlib.chdir(folder):
            return _BLOCK.sub(lambda block: f"```console\n{_STEP.sub(_step, block[1])}```", text)


def is_quick(command: str, output: str) -> bool:
    """Whether a page shows the output of a quick command on an example."""
    words = [] if command.endswith("\\") else shlex.split(command, comments=True)  # which goes on in the next line
    on_example = any(word.startswith("examples/") and word.endswith((".toml", ".json")) for word in words)
    quick = words[:1] == ["stepsight"] and words[1] in COMMANDS and os.devnull not in words
    return bool(output.strip()) and quick and on_example


def _step(found: re.Match[str]) -> str:
    command, output = found[1], found[2]
    if not is_quick(command, output):
        return found[0]
    words = shlex.split(command, comments=True)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            app(words[1:], standalone_mode=False)
    except StepsightError:  # needs a file that the page only names
        return found[0]
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    cut = {line.partition("  ")[0] for line in output.splitlines() if line.endswith(": ...")}
    lines = [re.sub(r": .*", ": ...", line, count=1) if line.partition("  ")[0] in cut else line for line in lines]
    if output.startswith("...\n"):
        begins = {line.partition("  ")[0] for line in output.splitlines()[1:]}
        lines = ["...", *(line for line in lines if line.partition("  ")[0] in begins)]
    kept = len(output.rstrip("\n").splitlines())
    shown = (
        lines if kept >= len(lines) - 1 or words[1] != "compare" else lines[:kept]
    )  # the page may show the first tables alone
    return f"$ {command}\n" + "\n".join(shown).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
