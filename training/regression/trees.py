"""LightGBM on residuals: fitted with it, saved as its text, evaluated with or without it.

Prediction needs no LightGBM: a loop that numba compiles is faster than LightGBM's own, and gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.caching import compiled
from stepsight.dataset.base.errors import PredictorError
from stepsight.features.node_features import check_known, columns_of

Array = NDArray[np.float64]

_SETTINGS: dict[str, dict[str, Any]] = read_toml(Path(__file__).with_name("trees.toml"))  # of LightGBM
ROUNDS = 120
MIN_ROWS = 24

MANY_ROWS = 2000  # from this number of rows on, trees may follow every step of a curve
ROUNDS_OF_MANY = 200
VERY_MANY_ROWS = 8000
ROUNDS_OF_VERY_MANY = 600

MOST_SUM = 12.0  # limit of each tree's largest leaf: no correction of physics exceeds a factor of exp(12)
MOST_TREES = 20_000
_WALKS = 1_000_000  # rows evaluated at once, to limit memory

# The parts of LightGBM's text that evaluation reads; the rest describes the training.
_HEADER = ("version", "num_class", "num_tree_per_iteration", "label_index", "max_feature_idx", "objective",
           "feature_names", "feature_infos")  # fmt: skip
_KEPT = ("num_leaves", "num_cat", "split_feature", "threshold", "decision_type", "left_child", "right_child")
_NAMES = "feature_names="
_DIGITS = 7  # of thresholds and leaves: far below any noise, and a third of the text


def fit_trees(
    features: Array, targets: Array, names: tuple[str, ...], seed: int, weights: Array | None = None
) -> Trees:
    """Fit trees to log-residuals: small and strongly regularised ones, or larger ones if there are many rows."""
    import lightgbm

    parameters, rounds = _SETTINGS["few"], ROUNDS
    if len(targets) >= MANY_ROWS:
        parameters = {**parameters, **_SETTINGS["many"]}
        rounds = ROUNDS_OF_MANY if len(targets) < VERY_MANY_ROWS else ROUNDS_OF_VERY_MANY
    binning = {"verbosity": -1, "max_bin": parameters["max_bin"]}
    data = lightgbm.Dataset(features, targets, weight=weights, feature_name=list(names), params=binning)
    booster = lightgbm.train({**parameters, "seed": seed}, data, num_boost_round=rounds)
    # Only the parts that evaluation needs are kept, with shortened numbers; LightGBM can still read them.
    header, *blocks = booster.model_to_string().split("\nTree=")
    lines = [line for line in header.splitlines() if line == "tree" or line.split("=")[0] in _HEADER]
    pieces = ["\n".join([*lines, ""])]
    for block in blocks:
        number, *body = block.split("\n\n", 1)[0].splitlines()
        fields = dict(line.split("=", 1) for line in body if "=" in line)
        kept = {key: fields[key] for key in _KEPT if key in fields}
        for key in ("threshold", "leaf_value"):
            kept[key] = " ".join(f"{float(value):.{_DIGITS}g}" for value in fields.get(key, "").split())
        told = [f"{key}={value}" for key, value in kept.items()]
        pieces.append("\n".join([f"Tree={number}", *told, f"shrinkage={fields.get('shrinkage', '1')}", "", ""]))
    return Trees("\n".join([*pieces, "end of trees", ""]))


class _Tree(NamedTuple):
    feature: NDArray[np.int64]
    threshold: Array
    left: NDArray[np.int64]  # >= 0: a node, < 0: leaf ~index
    right: NDArray[np.int64]
    leaf: Array


@dataclass(frozen=True)
class Trees:
    """A LightGBM model from its text."""

    text: str  # as Booster.model_to_string writes it
    share: float = 1.0  # part of its prediction that counts; the neighbours make up the rest where they can

    @cached_property
    def _packed(self) -> tuple[_Tree, NDArray[np.int64], float]:
        """Pack all trees into one array of nodes and one of leaves, with each root and the largest possible sum."""
        try:
            trees = [_read_tree(block) for block in self.text.split("\nTree=")[1:]]
        except (KeyError, ValueError, IndexError) as error:
            raise PredictorError(f"a regressor must be LightGBM text, got a tree without {error}") from None
        nodes = np.cumsum([0, *(len(tree.feature) for tree in trees)])
        leaves = np.cumsum([0, *(len(tree.leaf) for tree in trees)])
        roots = np.array(
            [n if len(t.feature) else ~leaf for t, n, leaf in zip(trees, nodes, leaves, strict=False)], int
        )
        moved = [_Tree(np.zeros(0, int), np.zeros(0), np.zeros(0, int), np.zeros(0, int), np.zeros(0))]
        for tree, node, leaf in zip(trees, nodes.tolist(), leaves.tolist(), strict=False):
            left, right = (np.where(to >= 0, to + node, to - leaf) for to in (tree.left, tree.right))
            moved.append(tree._replace(left=left, right=right))
        forest = _Tree(*map(np.concatenate, zip(*moved, strict=True)))
        return forest, roots, sum(float(np.abs(tree.leaf).max()) for tree in trees)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the features, in the order of their numbers in splits."""
        header = self.text.split("\nTree=", 1)[0].splitlines()
        found = next((line for line in header if line.startswith(_NAMES)), _NAMES)
        return tuple(found.removeprefix(_NAMES).split())

    @cached_property
    def _read(self) -> NDArray[np.int64]:
        """Numbers of the features that splits read, in order."""
        read = np.unique(self._packed[0].feature)
        if len(read) and read[-1] >= len(self.names):
            rule = "a regressor must name every feature that it reads"
            raise PredictorError(f"{rule}, got {len(self.names)} names and a split on feature {read[-1]}")
        return read

    def check(self, names: Sequence[str]) -> None:
        """Parse the text now, and check that it is a LightGBM model that can be evaluated on these features."""
        if not 0 < self.share <= 1:
            raise PredictorError(f"0 < share <= 1 must hold for trees, got {self.share}")
        if len(set(self.names)) != len(self.names):
            raise PredictorError("a regressor must name every feature once")
        blocks = self.text.count("\nTree=")
        if blocks > MOST_TREES:
            raise PredictorError(f"a regressor must have at most {MOST_TREES} trees, got {blocks}")
        forest, _, largest = self._packed
        if not np.isfinite(forest.threshold).all() or largest > MOST_SUM:
            rule = f"thresholds must be finite and leaves add up to at most {MOST_SUM:g}"
            raise PredictorError(f"{rule}, got {largest:g}")
        check_known([self.names[index] for index in self._read], names, "a regressor")

    def predict(self, features: Array, names: tuple[str, ...]) -> Array:
        """Sum of all trees times a share for each row, shape ``(rows,)``; ``names`` are those of the columns."""
        if names != self.names:
            own = np.zeros((len(features), len(self.names)))
            own[:, self._read] = features[:, columns_of([self.names[i] for i in self._read], names, "a regressor")]
            features = own
        forest, roots, _ = self._packed
        found, most = np.zeros(len(features)), max(1, _WALKS // max(len(roots), 1))
        for start in range(0, len(features), most):
            some = np.ascontiguousarray(features[start : start + most])
            leaves = np.empty((len(some), len(roots)))
            (descend if descend.is_compiled else descend_together)(forest, roots, some, leaves)
            found[start : start + most] = self.share * leaves.sum(axis=1)
        return found


@compiled
def descend(forest: _Tree, roots: NDArray[np.int64], features: Array, leaves: Array) -> None:
    """Evaluate every tree, by its root, for every row of features; fills ``leaves``, ``(rows, trees)``."""
    for tree in range(len(roots)):  # the nodes of a tree stay in the nearest cache
        for row in range(len(features)):
            at = roots[tree]
            while at >= 0:
                goes_left = features[row, forest.feature[at]] <= forest.threshold[at]
                at = forest.left[at] if goes_left else forest.right[at]
            leaves[row, tree] = forest.leaf[~at]


def descend_together(forest: _Tree, roots: NDArray[np.int64], features: Array, leaves: Array) -> None:
    """Like ``descend``, for all rows and trees one level at a time; used before numba is loaded."""
    rows = np.repeat(np.arange(len(features)), len(roots))
    at = np.tile(roots, len(features))
    inner = np.flatnonzero(at >= 0)
    while len(inner):
        node = at[inner]
        goes_left = features[rows[inner], forest.feature[node]] <= forest.threshold[node]
        at[inner] = np.where(goes_left, forest.left[node], forest.right[node])
        inner = inner[at[inner] >= 0]
    leaves[:] = forest.leaf[~at].reshape(leaves.shape)


def _read_tree(block: str) -> _Tree:
    fields = dict(line.split("=", 1) for line in block.split("\n\n", 1)[0].splitlines() if "=" in line)

    def integers(key: str) -> NDArray[np.int64]:
        return np.array(fields.get(key, "").split(), dtype=np.int64)

    decisions = integers("decision_type")
    if (decisions & 1).any():
        raise ValueError("numerical splits alone")
    tree = _Tree(
        integers("split_feature"),
        np.array(fields.get("threshold", "").split(), dtype=np.float64),
        integers("left_child"),
        integers("right_child"),
        np.array(fields["leaf_value"].split(), dtype=np.float64),
    )
    inner = np.arange(len(tree.feature))
    for child in (tree.left, tree.right):  # children come after their parent, so that every walk ends
        if len(child) != len(inner) or (~child >= len(tree.leaf)).any():
            raise ValueError("a child for every node")
        if not ((child < 0) | ((child > inner) & (child < len(inner)))).all():
            raise ValueError("children that follow their parent")
    if (tree.feature < 0).any():
        raise ValueError("features from 0 on")
    if len(tree.threshold) != len(inner) or not np.isfinite(tree.leaf).all() or not len(tree.leaf):
        raise ValueError("finite leaves")
    return tree
