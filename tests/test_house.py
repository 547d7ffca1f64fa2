"""The house: who may import whom, and that the package is whole."""

import ast
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "dataset": {"dataset"},
    "features": {"features", "dataset"},
    "gnn": {"gnn", "features", "dataset"},
    "simulator": {"simulator", "dataset"},
    "training": {"training", "gnn", "features", "dataset", "simulator"},
    "experiments": {"experiments", "training", "gnn", "features", "dataset", "simulator"},
}
NOUNS = ("errors", "op", "program", "hardware", "physics", "job", "models", "files")


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_lower_never_imports_higher(folder: str) -> None:
    """stepsight -> experiments -> training -> gnn -> features -> dataset; simulator -> dataset."""
    for path in (ROOT / folder).rglob("*.py"):
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("stepsight.")}
        assert rooms <= MAY_IMPORT[folder], f"{path.relative_to(ROOT)} imports {sorted(rooms - MAY_IMPORT[folder])}"


def test_harness_needs_torch_and_the_standard_library_alone() -> None:
    """The harness runs in users' clusters: no other package of ours or of others."""
    for path in (ROOT / "dataset" / "harness").rglob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops <= set(sys.stdlib_module_names) | {"torch"}, f"{path.name} imports {tops}"


@pytest.mark.parametrize(
    "path", [*(ROOT / "simulator").glob("*.py"), *(ROOT / "dataset" / f"{n}.py" for n in NOUNS)], ids=lambda p: p.stem
)
def test_simulator_and_nouns_import_numpy_and_numba_only(path: Path) -> None:
    """A prediction from a saved predictor must start fast."""
    tops = {name.split(".")[0] for name in imports(path)}
    assert tops <= set(sys.stdlib_module_names) | {"numpy", "numba", "stepsight"}


def test_import_is_light() -> None:
    """``import stepsight`` loads no heavy library."""
    heavy = "{'torch', 'lightgbm', 'mlflow', 'torch_geometric', 'pandas', 'optuna'}"
    code = f"import sys, stepsight; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_types_links() -> None:
    """Type checkers see every mapped folder."""
    for folder in MAY_IMPORT:
        assert (ROOT / ".types" / "stepsight" / folder).resolve() == ROOT / folder


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
    for folder in MAY_IMPORT:
        wanted = {
            path.relative_to(ROOT / folder)
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".toml") and "studies" not in path.parts
        }
        missing = {str(p) for p in wanted if not (installed / folder / p).exists()}
        assert not missing, f"{folder} lacks {sorted(missing)}: see pyproject.toml's packages"
