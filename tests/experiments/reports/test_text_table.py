"""Tables line up."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepsight.experiments.reports import text_table as notebook_bar
from stepsight.experiments.reports.text_table import NotebookBar, Number, table


def test_columns_line_up() -> None:
    """Words go to the left, numbers to the right, with their decimals."""
    text = table(["name", "ms"], [["a", Number(1.25, 1)], ["longer", Number(10, 1)]])
    assert text.splitlines() == ["name      ms", "------  ----", "a        1.2", "longer  10.0"]


def test_huge_numbers_have_an_exponent() -> None:
    """Nobody reads three hundred digits."""
    assert str(Number(-1e300)) == "-1e+300" and str(Number(123456.78, 1)) == "123456.8"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a notebook displays, with IPython replaced."""
    texts: list[Any] = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    handle = SimpleNamespace(update=texts.append)

    def show(text: str, *, display_id: bool) -> SimpleNamespace:
        texts.append(text)
        return handle

    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(display).update(display=show, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook_bar, "_QUIET_S", 0.0)
    monkeypatch.setattr(notebook_bar, "_PAUSE_S", 0.0)
    return texts


def test_a_notebook_shows_a_bar(shown: list[Any]) -> None:
    """One output that is updated; its last text has the last counts."""
    with NotebookBar("rows") as bar:
        for done in range(1, 4):
            bar.show(done, 3, "a < b")
    assert shown[-1] == '<progress value="3" max="3"></progress> 3 of 3 rows  a &lt; b'
    with NotebookBar("strategies") as bar:
        bar.show(7)
    assert shown[-1] == "7 strategies"


def test_elsewhere_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with NotebookBar("rows") as bar:
        bar.show(1, 2)
    assert not bar.active and capsys.readouterr() == ("", "")
