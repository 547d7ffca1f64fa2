"""Which layers have experts, and which stage has which layers, as configurations write it."""

from __future__ import annotations

import ast
import re
from typing import Any

from stepsight.dataset.configs.drafts import Reading
from stepsight.dataset.job.rules import MOST_LAYERS

MOST_STAGES = 10_000
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)")


def even_stages(stages: int, layers: int, first: int, last: int) -> list[int]:
    """Layers of each stage where embedding and output count as some layers each."""
    even, rest = divmod(layers + first + last, max(1, stages))
    counts = [even + (stage < rest) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


def stages_of_layout(layout: str) -> list[str]:
    """The stages of a layout as ``Et|(tt|)*29|mL``, each with a letter for each of its layers; empty: too long."""
    text = re.sub(r"[\s,]", "", layout)
    while (found := _REPEATED.search(text)) is not None:
        what, count = found[1] if found[1] is not None else found[3], int(found[2] or found[4])
        if count * len(what) > MOST_STAGES or len(text) > MOST_STAGES:
            return []
        text = text[: found.start()] + what * count + text[found.end() :]
    return text.split("|")


def expert_layers(reading: Reading, frequency: Any, source: str) -> None:
    """Which layers have experts: every n-th one, or a pattern of zeros and ones."""
    text = frequency if isinstance(frequency, str) else repr(frequency)
    if text.strip().isdigit():
        if int(text) > 1:
            reading.map("model.moe_every", int(text), words=source)
        return
    pattern = _pattern(text)
    dense = next((place for place, one in enumerate(pattern) if one), len(pattern))
    if pattern and all(pattern[dense:]):
        reading.map("model.dense_layers", dense, words=f"{source} {text}")
        return
    places = [(every, place) for every in range(2, 9) for place in range(every)]
    every = next((n for n, k in places if pattern == [int(i % n == k) for i in range(len(pattern))]), 0)
    if every:
        reading.map("model.moe_every", every, words=f"{source} {text}")
    else:
        reading.ignore(f"{source} {text}: a job has dense layers first, or experts in every n-th layer")


def _pattern(text: str) -> list[int]:
    """A list written as Python: ``[0]*3+[1]*58``; empty if it is something else."""
    try:
        return _listed(ast.parse(text.strip().strip("'\""), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _listed(node: ast.AST) -> list[int]:
    if isinstance(node, ast.List) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [int(item.value == 1) for item in node.elts if isinstance(item, ast.Constant)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found = _listed(node.left) + _listed(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        count = node.right.value
        if type(count) is not int or not 0 <= count <= MOST_LAYERS:
            raise ValueError("a pattern's count must be a small whole number")
        found = _listed(node.left) * count
    else:
        raise ValueError("a pattern is made of lists, + and *")
    if len(found) > MOST_LAYERS:
        raise ValueError("a pattern is longer than any model")
    return found
