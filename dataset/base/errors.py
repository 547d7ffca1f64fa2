"""The errors that users can meet.

::

    ValueError
     +-- StepsightError          anything that a user can correct; the message states the rule and the values
          +-- JobError           a job that cannot exist (degrees, sizes, unknown keys)
          +-- TraceError         a trace or run folder that is missing, truncated or inconsistent
          +-- TableError         a table of measurements that is malformed
          +-- PredictorError     a folder that is not a predictor, or a predictor for other hardware
          +-- CollectError       a collection that cannot run here
          +-- CaptureError       a script that cannot be captured, or a folder that is not a capture

``assert`` is for our own bugs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec

SHOWN = 80  # characters of a value in an error
_MOST = 1400  # characters of a message: a job may break many rules
_LONG = re.compile(r"\S{300,}")  # a word that is longer than any path that people type


def shorten(value: object, most: int = SHOWN) -> str:
    """Text of a value for an error: long values are cut in the middle, and unprintable characters are escaped.

    A text stands as it is, anything else by its ``repr``.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints; a table that contains itself
        text = f"a {type(value).__name__} that is too large to print"
    text = text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= most else f"{text[: most * 3 // 4]}...{text[-(most - most * 3 // 4 - 3) :]}"


def repeated(names: Iterable[str], most: int = 3) -> str:
    """Names that are there more than once, for an error: the first ones, and how many more; "" if there are none."""
    found = sorted(name for name, count in Counter(names).items() if count > 1)
    return ", ".join(map(shorten, found[:most])) + (f" and {len(found) - most} more" if len(found) > most else "")


# What a value that is none of a reader's raises, in a file that is none of its format.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Lines of text in which control characters are escaped: names in a trace may hold any, and terminals obey them."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


class StepsightError(ValueError):
    """A mistake that the user can correct; very long words, and the middle of a very long message, are left out."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_cut(told) if isinstance(told, str) else told for told in arguments))


def _cut(text: str) -> str:
    text = _LONG.sub(lambda word: shorten(word[0]), text)
    return text if len(text) <= _MOST else f"{text[: _MOST * 3 // 4]} ... {text[-_MOST // 4 :]}"


class JobError(StepsightError):
    """A job that breaks a rule; the message lists every broken rule."""


class TraceError(StepsightError):
    """A trace or run folder that cannot be read completely."""


class TableError(StepsightError):
    """A table of measurements that cannot be read completely."""


class PredictorError(StepsightError):
    """A folder that is not a predictor, or a predictor for other hardware."""


class CollectError(StepsightError):
    """A collection that cannot run on this machine."""


class CaptureError(StepsightError):
    """A script that cannot be captured, or a folder that is not a capture."""


# By top-level module; for modules of several extras, the smallest one.
_MODULES = {
    "collect": "torch",
    "models": "onnx",
    "page": "nicegui",
    "tables": "pyarrow",
    "search": "matplotlib optuna pandas plotly sqlalchemy",
    "train": "lightgbm mlflow scipy torch_geometric",
    "testing": "pytest",
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules.split()}


def missing_extra(error: ImportError) -> str:
    """What to install, in one line; empty for errors with another cause."""
    module = (error.name or "").split(".")[0]
    return _advice(module) if module in EXTRAS else ""


def need(module: str) -> None:
    """Check that a library is installed, before work that would fail without it in another process."""
    if find_spec(module) is None:
        raise StepsightError(_advice(module))


def _advice(module: str) -> str:
    extra = EXTRAS[module]
    return f'this needs {module}, which is not installed: pip install "stepsight[{extra}]", or "stepsight[all]"'
