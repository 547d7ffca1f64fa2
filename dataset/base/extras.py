"""Libraries that only some verbs need, and the package's extras that install them."""

from __future__ import annotations

from importlib.util import find_spec
from types import MappingProxyType

from stepsight.dataset.base.errors import StepsightError

# By top-level module; for modules of several extras, the smallest one.
EXTRAS = MappingProxyType(
    {
        "lightgbm": "train",
        "matplotlib": "search",
        "mlflow": "train",
        "onnx": "models",
        "optuna": "search",
        "pandas": "search",
        "plotly": "search",
        "pyarrow": "tables",
        "scipy": "train",
        "sqlalchemy": "search",
        "torch": "collect",
        "torch_geometric": "train",
    }
)


def missing_extra(error: ImportError) -> str:
    """What to install, in one line; empty for errors with another cause."""
    module = (error.name or "").split(".")[0]
    if module not in EXTRAS:
        return ""
    return _advice(module)


def need(module: str) -> None:
    """Check that a library is installed, before work that would fail without it in another process.

    Raises:
        StepsightError: If it is not; the message says what to install.
    """
    if find_spec(module) is None:
        raise StepsightError(_advice(module))


def _advice(module: str) -> str:
    extra = EXTRAS[module]
    return f'this needs {module}, which is not installed: pip install "stepsight[{extra}]", or "stepsight[all]"'
