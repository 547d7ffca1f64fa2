"""The public names: light to import, lazy, documented, and seen by tools."""

import ast
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepsight
import stepsight.testing
from stepsight import optuna, registries

FUNCTIONS = [name for name in stepsight.__all__ if inspect.isfunction(getattr(stepsight, name))]

JOB = str(Path(__file__).parents[2] / "examples" / "gpt3-175b-1024.toml")


def test_import_loads_nothing_else() -> None:
    """``import stepsight`` and ``dir`` of it load no other module of the package and no library."""
    code = (
        "import sys; before = set(sys.modules); import stepsight; dir(stepsight); "
        "print(*(set(sys.modules) - before - {'stepsight'}) & {'numpy', 'torch', 'pandas'}, "
        "*(m for m in sys.modules if m.startswith('stepsight.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    """Every import for type checkers is a public name."""
    tree = ast.parse(Path(str(stepsight.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.asname) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {(module, name) for name, module in stepsight._MODULES.items()} and len(seen) > 30


def test_every_name_is_there_and_documented() -> None:
    assert dir(stepsight) == sorted(dir(stepsight)) == sorted([*stepsight.__all__, "__version__"])
    for name in stepsight.__all__:
        assert inspect.getdoc(getattr(stepsight, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'predikt'"):
        _ = stepsight.predikt  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [registries, registries.blocks, stepsight.testing, optuna])
def test_help_of_a_public_module_shows_what_it_re_exports(module: Any) -> None:
    """``help`` and ``import *`` go by ``__all__``, which has the module's own names and none of its helpers."""
    text = pydoc.plain(pydoc.render_doc(module))
    listed = {name: getattr(module, name) for name in module.__all__}
    shown = [thing.__name__ for thing in listed.values() if inspect.isclass(thing)]
    assert shown and all(f"class {name}" in text for name in shown)
    assert not listed.keys() & {"FORMATS", "TYPE_CHECKING", "annotations", "need", "pytest"}


def test_an_op_that_overlaps_keeps_its_earlier_name() -> None:
    assert registries.blocks.Beside is registries.blocks.OverlappedOp


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"clear_caches", "step"}))
def test_help_shows_arguments_result_errors_and_an_example(name: str) -> None:
    text = pydoc.render_doc(getattr(stepsight, name))
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in text
    for argument in inspect.signature(getattr(stepsight, name)).parameters:
        assert f"{argument}:" in text.split("Args:")[1].split("Returns:")[0]


@pytest.mark.parametrize("name", [n for n in stepsight.__all__ if n.endswith("Error")])
def test_errors_are_value_errors(name: str) -> None:
    """One ``except`` catches all of them."""
    assert issubclass(getattr(stepsight, name), stepsight.StepsightError) and issubclass(
        stepsight.StepsightError, ValueError
    )


def test_a_job_in_a_dict_goes_all_the_way() -> None:
    """Predict and search answer for the same tables; the results have tables and values."""
    tables: dict[str, Any] = {
        "model": {"family": "gpt", "layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq_len": 256},
        "batch": {"micro_batch": 1, "global_batch": 16},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 4},
    }
    prediction = stepsight.predict(tables)
    (again,) = stepsight.predict_many([tables])
    assert again.iteration_time_s == prediction.iteration_time_s
    result = stepsight.search(tables, trials=5)
    assert result.best.prediction.iteration_time_s <= prediction.iteration_time_s
    frame = result.to_frame()
    assert list(frame["fits"]) == [choice.fits for choice in result.choices]
    assert list(frame.columns) == list(result.to_dict()["best"])
    assert set(result.best.to_dict()) < set(frame.columns) and len(result.front) == 1
    goal = stepsight.Goal(objective="energy", tokens=1e9)
    plans = stepsight.search(tables, goal=goal, scenarios=stepsight.Scenarios(nodes=(1, 2)), trials=5).plans
    assert [plan.job.cluster.nodes for plan in plans]
    assert len(repr(result)) < 160 and len(repr(result.best)) < 120


def test_mistakes_of_python_callers(tmp_path: Path) -> None:
    """Arguments of a wrong type are refused in words, and paths may be text."""
    with pytest.raises(stepsight.StepsightError, match="goal must be a Goal"):
        stepsight.search(JOB, goal="cost")  # type: ignore[arg-type]
    with pytest.raises(stepsight.StepsightError, match="scenarios must be Scenarios"):
        stepsight.search(JOB, scenarios={"nodes": [1]})  # type: ignore[arg-type]
    with pytest.raises(stepsight.StepsightError, match="storage must be"):
        stepsight.search(JOB, storage=3)  # type: ignore[arg-type]
    with pytest.raises(stepsight.JobError, match="predict_many takes several jobs"):
        stepsight.predict_many(JOB)
    out = tmp_path / "train.sh"
    out.write_text(stepsight.write_config(JOB, "megatron-script").text)
    assert stepsight.read_configs(str(out)).formats == stepsight.read_configs([out]).formats
