"""The house: who may import whom, how large things are, and that the package is whole."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("dataset", "features", "gnn", "simulator", "training", "experiments")
MOST_LINES, MOST_FUNCTION_LINES, MOST_POSITIONAL = 450, 60, 6
VERBS = ROOT / "stepsight" / "cli"  # their docstrings say what each option means
MODULES = sorted(path for folder in (*FOLDERS, "stepsight") for path in (ROOT / folder).rglob("*.py"))

# Where a forbidden import is planted, the import, and what the linter says of it.
PLANTED = {
    "facade": (
        "features/node_features.py",
        "from stepsight import training",
        "stepsight.features.node_features imports stepsight.training",
    ),
    "relative": (
        "simulator/iteration/simulate.py",
        "from ...training import fitting",
        "stepsight.simulator.iteration.simulate imports stepsight.training.fitting",
    ),
    "out of the harness": (
        "dataset/harness/ops/composite.py",
        "from ...job.job import Job",
        "stepsight.dataset.harness.ops.composite imports stepsight.dataset.job.job",
    ),
    "importlib": (
        "features/node_features.py",
        "import importlib\nimportlib.import_module('stepsight.training')",
        "stepsight.features.node_features:",
    ),
    "builtin": ("gnn/loss.py", "__import__('stepsight.experiments')", "stepsight.gnn.loss:"),
    "pandas": ("dataset/kinds/op.py", "import pandas as pd", "stepsight.dataset.kinds.op imports pandas"),
    "torch in a sub-folder": (
        "simulator/memory/peaks.py",
        "from torch import Tensor",
        "stepsight.simulator.memory.peaks imports torch",
    ),
    "numpy in the harness": (
        "dataset/harness/plan/plan_checks.py",
        "import numpy",
        "stepsight.dataset.harness.plan.plan_checks imports numpy",
    ),
    "lazy, in a sub-folder": (
        "training/regression/trees.py",
        "def f():\n    from stepsight.experiments.questions import describe",
        "stepsight.training.regression.trees imports stepsight.experiments.questions.describe",
    ),
    "a study": (
        "experiments/questions/describe.py",
        "def f():\n    from stepsight.experiments.studies import bench",
        "stepsight.experiments.questions.describe -> stepsight.experiments.studies.bench",
    ),
    "a run folder": (
        "training/fitting/train_runs.py",
        "from stepsight.dataset.runs.run_folder import read_run",
        "stepsight.training.fitting.train_runs -> stepsight.dataset.runs.run_folder",
    ),
    "a lazy cycle": (
        "dataset/hardware/hardware.py",
        "def f():\n    import stepsight.simulator.iteration.simulate",
        "stepsight.dataset.hardware.hardware imports stepsight.simulator",
    ),
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on a tree."""
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    command = [sys.executable, "-c", code, "--config", str(root / "pyproject.toml"), "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "1000"}
    return subprocess.run(command, cwd=root / ".types", env=environment, capture_output=True, text=True, check=False)


def test_imports_keep_their_contracts() -> None:
    """The contracts are in ``pyproject.toml``."""
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def said_of_planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of a copy of the tree in which every forbidden import is planted."""
    copy = tmp_path_factory.mktemp("house")
    for path in (*MODULES, ROOT / "pyproject.toml", ROOT / "tests" / "house_contracts.py"):
        (copy / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy / path.relative_to(ROOT))
    shutil.copytree(ROOT / ".types", copy / ".types", symlinks=True)
    for place, forbidden, _ in PLANTED.values():
        with (copy / place).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{forbidden}\n")
    return lint(copy).stdout


@pytest.mark.parametrize("name", PLANTED)
def test_a_forbidden_import_is_caught(said_of_planted: str, name: str) -> None:
    assert PLANTED[name][2] in said_of_planted


def test_a_cycle_is_caught_though_it_is_lazy(said_of_planted: str) -> None:
    _, _, cycles = said_of_planted.partition("No module imports itself through others\n")
    assert any("stepsight.dataset.hardware.hardware" in line for line in cycles.splitlines() if line.count(" -> ") > 1)


def test_type_checkers_and_the_linter_see_every_folder() -> None:
    """``.types/stepsight``, which ``make`` writes, links everything that is in the package."""
    places = [*(ROOT / folder for folder in FOLDERS), *(ROOT / "stepsight").glob("[!.]*")]
    for place in places:
        if place.name not in ("__pycache__", "py.typed"):
            assert (ROOT / ".types" / "stepsight" / place.name).resolve() == place, (
                f"link .types/stepsight/{place.name}: make .types/stepsight"
            )


def test_modules_are_small() -> None:
    long = [
        f"{p.relative_to(ROOT)} has {n} lines"
        for p in MODULES
        if (n := len(p.read_text("utf-8").splitlines())) > MOST_LINES
    ]
    assert long == []


def test_functions_are_short_and_take_few_positional_arguments() -> None:
    wrong = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.parent != VERBS:
                where, lines = f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1
                named = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                positional = len(named) - (named[:1] in (["self"], ["cls"], ["ctx"]))
                if lines > MOST_FUNCTION_LINES:
                    wrong.append(f"{where} has {lines} lines")
                if positional > MOST_POSITIONAL:
                    wrong.append(f"{where} has {positional} positional arguments")
    assert wrong == []


def test_import_is_light() -> None:
    """``import stepsight`` loads no heavy library."""
    heavy = "{'torch', 'lightgbm', 'mlflow', 'torch_geometric', 'pandas', 'optuna'}"
    code = f"import sys, stepsight; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_built_wheel_is_whole(tmp_path: Path) -> None:
    """sdist -> wheel -> a fresh environment holds every module and data file of the repository."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT], check=True, capture_output=True
    )
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=False)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = tmp_path.glob("*.whl")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    where = subprocess.run(
        [python, "-c", "import stepsight; print(stepsight.__path__[0])"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    installed = Path(where.stdout.strip())
    for folder in (*FOLDERS, "stepsight"):
        there = installed if folder == "stepsight" else installed / folder
        wanted = {
            path.relative_to(ROOT / folder)
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".toml") and "studies" not in path.parts
        }
        missing = {str(p) for p in wanted if not (there / p).exists()}
        assert not missing, f"{folder} lacks {sorted(missing)}: see pyproject.toml's packages"
