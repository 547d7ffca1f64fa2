"""The context model without PyTorch: its weights, and its forward pass in numpy.

Prediction must start fast, and a forward pass over a few hundred nodes is a handful of matrix products.
``tests/gnn`` holds it to the PyTorch Geometric model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import read_file
from stepsight.dataset.base.errors import PredictorError
from stepsight.dataset.base.files import read_json, write_json
from stepsight.dataset.graph.program import Program
from stepsight.dataset.hardware.hardware import Hardware
from stepsight.features.graph_features import RELATIONS, Topology, check_node_features, node_features, topology
from stepsight.features.op_features import FEATURE_VERSION, check_version

Array = NDArray[np.float64]

SCHEMA = 1
MOST_BOUND = 10.0  # largest allowed bound of a correction, in log units
WEIGHTS = "gnn.safetensors"
CONFIG = "gnn.json"


@dataclass(frozen=True)
class ContextWeights:
    """Weights of ``gnn.context_model.ContextModel``.

    Attributes:
        bound: Largest absolute log-correction.
        num_layers: Rounds of message passing; 0: a network without edges.
        tensors: By name, as in the PyTorch model's ``state_dict``.
        features: Names of the features that it reads, in the order of its weights.
    """

    bound: float
    num_layers: int
    tensors: Mapping[str, Array]
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is, for reports."""
        return "graph network" if self.num_layers else "network without edges"

    def log_correction(self, program: Program, alone: Array, hardware: Hardware, busy: int) -> Array:
        """Log of seconds in context over seconds alone for every node, ``(len(program),)``, within ``+-bound``."""
        return self.forward(node_features(program, alone, hardware, busy, self.features), topology(program))

    def forward(self, features: Array, graph: Topology) -> Array:
        """Forward pass on features, ``(nodes, len(self.features))``, of one or several joined programs."""
        features = np.clip(features, self.tensors["low"], self.tensors["high"])
        hidden = _silu(self._linear("encode", features))
        for layer in range(self.num_layers):
            heard = [hidden, _stream_mean(hidden, graph)]
            for relation in RELATIONS:
                source, target = graph.edges[relation]
                heard.append(_mean(hidden, source, target, graph.num_nodes))
                if relation != "may_run_concurrently":
                    heard.append(_mean(hidden, target, source, graph.num_nodes))
            hidden = hidden + _silu(self._linear(f"layers.{layer}.combine", np.concatenate(heard, axis=1)))
        raw = self._linear("decode", hidden) + self._linear("direct", features)
        return np.asarray(self.bound * np.tanh(raw[:, 0] / self.bound))

    def _linear(self, name: str, value: Array) -> Array:
        return np.asarray(value @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"])

    def save(self, folder: Path) -> None:
        """Write ``gnn.json`` and ``gnn.safetensors`` into a predictor's folder."""
        from safetensors.numpy import save_file

        save_file({name: np.asarray(t, np.float32) for name, t in self.tensors.items()}, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(0o644)  # mode of the other files; safetensors makes files readable only by their owner
        config = {
            "schema": SCHEMA,
            "bound": self.bound,
            "num_layers": self.num_layers,
            "features_version": FEATURE_VERSION,
            "features": list(self.features),
            "relations": list(RELATIONS),
        }
        write_json(folder / CONFIG, config)

    @classmethod
    def load(cls, folder: Path) -> ContextWeights:
        """Read the files that ``save`` wrote.

        Raises:
            PredictorError: If a file is missing or broken, or it reads features that this version does not have.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            config = read_json(folder / CONFIG)
            tensors = {name: np.asarray(t, np.float64) for name, t in load(read_file(folder / WEIGHTS)).items()}
            features = _check_config(config, str(folder / CONFIG))
            bound, layers = config["bound"], config["num_layers"]
            if type(bound) not in (int, float) or not 0 < bound <= MOST_BOUND or type(layers) is not int or layers < 0:
                raise PredictorError(
                    f"{folder / CONFIG} must have a bound of 0 to {MOST_BOUND} and a whole num_layers, "
                    f"got {bound!r:.40} and {layers!r:.40}"
                )
            model = cls(float(bound), layers, tensors, features)
            model.forward(np.zeros((1, len(features))), _ONE_NODE)
        except PredictorError:
            raise
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise PredictorError(f"{folder / WEIGHTS} must be what Predictor.save wrote, got {error}") from None
        return model


def _check_config(config: dict[str, Any], name: str) -> tuple[str, ...]:
    """Features that a saved model reads; the first models did not write their version and relations."""
    if config["schema"] != SCHEMA:
        raise PredictorError(f"{name} must have schema {SCHEMA}, got {config['schema']!r:.40}: train it again")
    if config.get("relations", list(RELATIONS)) != list(RELATIONS):
        raise PredictorError(
            f"{name} must hear relations {', '.join(RELATIONS)}, got {config['relations']!r:.200}: train it again"
        )
    check_version(config.get("features_version", 1), name)
    features = tuple(str(feature) for feature in config["features"])
    if len(set(features)) != len(features):
        raise PredictorError(f"{name} must name every feature once, got {len(features) - len(set(features))} twice")
    check_node_features(features, name)
    return features


_ONE_NODE = Topology(1, {r: np.zeros((2, 0), np.int64) for r in RELATIONS}, np.zeros(1, np.int64), 1)


def _silu(value: Array) -> Array:
    return np.asarray(value / (1.0 + np.exp(-np.clip(value, -60, 60))))


def _mean(hidden: Array, source: NDArray[np.int64], target: NDArray[np.int64], num_targets: int) -> Array:
    """Mean of the sources of each target, ``(num_targets, hidden)``; zero where there is none."""
    total = np.zeros((num_targets, hidden.shape[1]))
    np.add.at(total, target, hidden[source])
    count = np.bincount(target, minlength=num_targets)
    return np.asarray(total / np.maximum(count, 1)[:, None])


def _stream_mean(hidden: Array, graph: Topology) -> Array:
    """The mean over the nodes of each node's stream."""
    state = _mean(hidden, np.arange(graph.num_nodes), graph.stream, graph.num_streams)
    return state[graph.stream]
