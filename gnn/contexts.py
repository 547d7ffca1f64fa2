"""Context models: what corrects seconds alone by the graph around them, the context network or one of a user's own.

The network is evaluated without PyTorch, as the mean of some trained models in numpy: prediction must start fast, and a
forward pass over a few hundred nodes is a handful of matrix products.  ``tests/gnn`` holds it to the PyTorch Geometric
model.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.base.registry import Registry, check_takes
from stepsight.features.node_features import (
    FEATURE_VERSION,
    HEARD,
    KIND,
    LABEL,
    RELATIONS,
    SegmentGraph,
    Topology,
    check_node_features,
    check_version,
    directions,
    node_features,
    topology,
)

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

SCHEMA = 2
MOST_BOUND = 10.0  # largest allowed bound of a correction, in log units
WEIGHTS, CONFIG = "gnn.safetensors", "gnn.json"
TABLE = "context_table.json"  # of earlier versions, which is refused
LEVELS = ("table", "features", "graph")  # each contains those before it
FORMS = {"none": (0.0, 0.0, 0.0), "table": (1.0, 0.0, 0.0), "features": (1.0, 1.0, 0.0), "graph": (1.0, 1.0, 1.0)}
LEAST_STRENGTH = 0.05  # a level with less of it gives the form no name


def form_of(strengths: Sequence[float]) -> str:
    """The highest level that counts, of ``FORMS``."""
    counting = [level for level, strength in zip(LEVELS, strengths, strict=True) if strength >= LEAST_STRENGTH]
    return counting[-1] if counting else "none"


def table_columns(features: Sequence[str]) -> tuple[list[int], list[int]]:
    """Columns of the features that say what a node is, and of those that say what its program is."""
    kinds, labels = ([at for at, name in enumerate(features) if name.startswith(what)] for what in (KIND, LABEL))
    return kinds, labels


@dataclass(frozen=True)
class ContextNetwork:
    """Log of seconds in context over seconds alone: ``s1 t + s2 (e - t) + s3 (n - e)``, within ``+-bound``."""

    bound: float  # largest absolute log-correction
    strengths: tuple[float, float, float]  # s1 of the table by kind and phase t, s2 of own features e, s3 of messages n
    num_layers: int  # rounds of messages
    # by name, as in the state_dict of gnn.context_model.ContextModel; the first axis of all but table, their mean,
    # numbers the models.  Heads that have no weight may be missing.
    tensors: Mapping[str, Array]
    features: tuple[str, ...]  # names of the features that it reads, in the order of its weights
    relations: tuple[str, ...] = HEARD  # names of the relations that it hears, in the order of its weights

    @property
    def form(self) -> str:
        """The highest level that counts, of ``FORMS``."""
        return form_of(self.strengths)

    @property
    def name(self) -> str:
        """Its kind and its strengths, for reports."""
        told = ", ".join(f"{level} {part:.2f}" for level, part in zip(LEVELS, self.strengths, strict=True))
        return f"context network ({told})"

    def __call__(self, graph: SegmentGraph, alone: Array) -> Array:
        """Seconds of every node within its segment, from the seconds alone, ``(nodes,)``."""
        features, edges = node_features(graph, alone, self.features), topology(graph.program)
        log = self.weights @ self.levels(features, edges, self.weights != 0.0)
        return np.asarray(alone * np.exp(np.clip(log, -self.bound, self.bound)))

    @property
    def weights(self) -> Array:
        """Of ``t``, ``e`` and ``n``, ``(3,)``, in sum ``s1``."""
        return np.asarray(-np.diff(self.strengths, append=0.0))

    def levels(self, features: Array, graph: Topology, wanted: Sequence[bool] = (True,) * 3) -> Array:
        """``t``, ``e`` and ``n``, ``(3, nodes)``, of one or several joined programs; those not wanted are zero."""
        found = np.zeros((len(LEVELS), len(features)))
        if wanted[0]:
            one = np.ones((len(features), 1))
            kinds, labels = (np.concatenate([one, features[:, own]], axis=1) for own in table_columns(self.features))
            found[0] = ((labels @ self.tensors["table"]) * kinds).sum(axis=1)
        if not any(wanted[1:]):
            return found
        features = np.clip(features, self.tensors["low"][:, None], self.tensors["high"][:, None])
        hidden = _silu(self._linear("encode", features))
        if wanted[1]:
            found[1] = self._head("features", hidden, features)
        if wanted[2]:
            for layer in range(self.num_layers):
                stream = _mean(hidden, np.arange(graph.num_nodes), graph.stream, graph.num_streams)[:, graph.stream]
                heard: list[Array | None] = [hidden, stream]  # None: no edges of a relation in a direction
                for relation, near, far in directions(self.relations):
                    ends = graph.edges[relation]
                    heard.append(_mean(hidden, ends[far], ends[near], graph.num_nodes) if ends.size else None)
                weight = self.tensors[f"layers.{layer}.combine.weight"].swapaxes(1, 2)
                combined, width = self.tensors[f"layers.{layer}.combine.bias"][:, None], hidden.shape[2]
                for place, each in enumerate(heard):  # a product for each: small ones run on one thread
                    if each is not None:
                        combined = combined + each @ weight[:, place * width : (place + 1) * width]
                hidden = hidden + _silu(combined)
            found[2] = self._head("graph", hidden, features)
        return found

    def _head(self, level: str, hidden: Array, features: Array) -> Array:
        raw = self._linear(f"heads.{level}.decode", hidden) + self._linear(f"heads.{level}.direct", features)
        return np.asarray(self.bound * np.tanh(raw[:, :, 0] / self.bound).mean(axis=0))

    def _linear(self, name: str, value: Array) -> Array:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return np.asarray(value @ weight.swapaxes(1, 2) + bias[:, None])

    def save(self, folder: Path) -> None:
        """Write ``gnn.json`` and ``gnn.safetensors`` into a predictor's folder."""
        from safetensors.numpy import save_file

        save_file({name: np.asarray(t, np.float32) for name, t in self.tensors.items()}, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(0o644)  # mode of the other files; safetensors makes files readable only by their owner
        config: dict[str, Any] = {"schema": SCHEMA, "features_version": FEATURE_VERSION, "bound": self.bound}
        config |= {name: list(getattr(self, name)) for name in ("strengths", "features", "relations")}
        write_json(folder / CONFIG, config | {"num_layers": self.num_layers})


def _of_weights(config: dict[str, Any], path: Path) -> ContextNetwork:
    """The network that ``ContextNetwork.save`` wrote."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    layers, relations, strengths = config["num_layers"], config["relations"], tuple(config["strengths"])
    what, features = "a context network", tuple(str(feature) for feature in config["features"])
    known = isinstance(relations, list) and set(map(str, relations)) <= set(RELATIONS)
    if not known or len(set(relations)) < len(relations):
        rule = f"{what} must hear some of {', '.join(RELATIONS)}, in this order"
        raise PredictorError(f"{rule}, got {relations!r:.200}: train it again")
    check_version(config["features_version"], what)
    if twice := len(features) - len(set(features)):
        raise PredictorError(f"{what} must name every feature once, got {twice} twice")
    check_node_features(features, what)
    try:
        tensors = {name: np.asarray(t, np.float64) for name, t in load(read_file(path.with_name(WEIGHTS))).items()}
    except (OSError, SafetensorError) as error:
        raise PredictorError(f"{WEIGHTS} must be what Predictor.save wrote, got {error}") from None
    parts = len(strengths) == len(LEVELS) and all(type(s) in (int, float) and 0 <= s <= 1 for s in strengths)
    if not parts or type(layers) is not int or layers < 0:
        rule = f"strengths must be {len(LEVELS)} from 0 to 1 and num_layers a whole number"
        raise ValueError(f"{rule}, got {strengths!r:.80} and {layers!r:.40}")
    network = ContextNetwork(float(config["bound"]), strengths, layers, tensors, features, tuple(relations))
    one = Topology(1, {r: np.zeros((2, 0), np.int64) for r in RELATIONS}, np.zeros(1, np.int64), 1)
    network.levels(np.zeros((1, len(features))), one, network.weights != 0.0)
    return network


def _silu(value: Array) -> Array:
    return np.asarray(value / (1.0 + np.exp(-np.clip(value, -60, 60))))


def _mean(hidden: Array, source: Ints, target: Ints, num_targets: int) -> Array:
    """Mean of the sources of each target, ``(models, num_targets, channels)``; zero where there is none."""
    means = np.zeros((len(hidden), num_targets, hidden.shape[2]))
    order = np.argsort(target, kind="stable")
    there, first, count = np.unique(target[order], return_index=True, return_counts=True)
    if len(there):
        means[:, there] = np.add.reduceat(hidden[:, source[order]], first, axis=1) / count[:, None]
    return means


OWN = "own_context.json"  # names a context model that is registered or that a package brings


class Context(Protocol):
    """A context model: called once for each distinct segment.

    Attributes:
        bound: Largest absolute logarithm of seconds in context over seconds alone; infinite if there is no limit.
        name: What it is, for reports.
        form: One of ``gnn.contexts.FORMS``, or ``own``.
        strengths: Of the levels of the context network; zero for another model.
    """

    @property
    def bound(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def strengths(self) -> tuple[float, ...]: ...

    def __call__(self, graph: SegmentGraph, alone: Array) -> Array:
        """Seconds of each node within its segment, from the seconds alone, ``(nodes,)`` each."""
        ...

    def save(self, folder: Path) -> None:
        """Write its files into a predictor's folder."""
        ...


ContextFunction = Callable[[Any, Any], Any]


def _checked(name: str, thing: Any) -> ContextFunction:
    check_takes(f"context model {name}", thing, ("graph", "alone"), PredictorError)
    return thing  # type: ignore[no-any-return]


CONTEXTS: Registry[ContextFunction] = Registry(
    "context model", group="stepsight.contexts", check=_checked, error=PredictorError
)


@dataclass(frozen=True)
class OwnContext:
    """A user's function ``model(graph, alone) -> seconds``.

    A ``torch.nn.Module`` gets the graph as ``HeteroData``, as ``TraceGraphs`` has those of segments, and a tensor of
    seconds, and returns one; any other callable gets a ``SegmentGraph`` and an array.  Nodes are in the order of issue.
    """

    model: ContextFunction  # the function or module
    registered: str = ""  # its name in CONTEXTS; empty if it has none, and so cannot be saved
    bound, form, strengths = math.inf, "own", (0.0, 0.0, 0.0)

    @classmethod
    def of(cls, model: ContextFunction | str) -> OwnContext:
        """Of a function, or of the name of one in ``CONTEXTS``."""
        return cls(CONTEXTS[model], model) if isinstance(model, str) else cls(_checked("", model))

    @property
    def name(self) -> str:
        """What it is, for reports."""
        return f"context model {self.registered or getattr(self.model, '__name__', type(self.model).__name__)}"

    def __call__(self, graph: SegmentGraph, alone: Array) -> Array:
        """As of every ``Context``; a model that fails, or gives other than seconds, is a ``PredictorError``."""
        torch = sys.modules.get("torch")  # without it there is no module
        try:
            if torch is not None and isinstance(self.model, torch.nn.Module):
                with torch.no_grad():
                    seconds = self.model(graph.to_heterodata(alone), torch.from_numpy(alone).float()).numpy()
            else:
                seconds = self.model(graph, alone)
            seconds = np.asarray(seconds, dtype=np.float64)
        except StepsightError:
            raise
        except Exception as error:  # the user's code
            raise PredictorError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        if seconds.shape != alone.shape or not (np.isfinite(seconds) & (seconds >= 0)).all():
            rule = f"{self.name} must give {len(alone)} numbers of seconds that are not negative"
            raise PredictorError(f"{rule}, got {seconds!r:.80}")
        return seconds

    def save(self, folder: Path) -> None:
        """Write its name into a predictor's folder; one without a name is a ``PredictorError``."""
        if not self.registered:
            rule = f"{self.name} must have a name in stepsight.registries.CONTEXTS to be saved"
            raise PredictorError(f"{rule}: register it, then with_context(NAME)")
        write_json(folder / OWN, {"name": self.registered})


def read_context(path: Path, config: Any) -> Context:
    """The context model of a predictor's folder from a file, read as ``config``; one of another schema is refused."""
    if path.name == OWN:
        return OwnContext.of(str(config["name"]))
    bound, schema = config["bound"], config["schema"]
    if schema != SCHEMA:
        raise PredictorError(f"a context network must have schema {SCHEMA}, got {schema!r:.40}: train it again")
    if type(bound) not in (int, float) or not 0 < bound <= MOST_BOUND:
        raise ValueError(f"bound must be from 0 to {MOST_BOUND}, got {bound!r:.40}")
    return _of_weights(config, path)
