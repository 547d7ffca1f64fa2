"""The example notebooks run, cell by cell, and hold no output.  ``make docs`` runs these tests."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell as a kernel does: what its last expression gives is shown."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if hasattr(shown, "_repr_html_"):
        assert shown._repr_html_()
    assert repr(shown)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_no_output(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.tutorial
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    for job in EXAMPLES.glob("*.toml"):
        shutil.copy(job, tmp_path)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    pyplot.switch_backend("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            run_cell("".join(cell["source"]), names)
    pyplot.close("all")
