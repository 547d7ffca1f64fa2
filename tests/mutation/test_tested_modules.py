"""Lists of files that a target of the Makefile reads name files that there are: nothing else runs them for weeks."""

import re
from pathlib import Path

from tests.mutation.tested_modules import TESTS

ROOT = Path(__file__).parents[2]


def test_mutated_modules_and_their_tests_are_there() -> None:
    named = {path for module, tests in TESTS.items() for path in (module, *tests)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_targets_run_what_is_there() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    modules = [f"{name.replace('.', '/')}" for name in re.findall(r"-m (tests[.\w]+)", text)]
    paths = re.findall(r"\b(?:tests|docs)/[\w/.]+", text)
    assert len(modules) > 3 and len(paths) > 15
    there = [(ROOT / name).exists() or (ROOT / f"{name}.py").exists() for name in (*modules, *paths)]
    assert [name for name, found in zip((*modules, *paths), there, strict=True) if not found] == []
