"""Context networks of random weights, and graphs for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from stepsight.dataset.graph.program import Dependency, ProgramBuilder
from stepsight.dataset.hardware.hardware import HARDWARE
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.node_features import RELATIONS, SegmentGraph
from stepsight.gnn.context_model import LAYERS, ContextModel, mean_network
from stepsight.gnn.contexts import ContextNetwork
from stepsight.training.predictor.model_tables import load_context

ALONE = np.full(100, 2e-4)


def graph_of(num_ops: int, label: str = "backward") -> SegmentGraph:
    """Products of growing size, each followed by a collective that waits for it."""
    builder = ProgramBuilder(label)
    for index in range(num_ops):
        op = builder.add(Op("linear", (64, 64 + index, 32), "fp32"))
        builder.add(Collective("all_reduce", 4096, 2, 2), "dp", after=[op], why=Dependency.SYNCHRONISATION)
    return SegmentGraph(builder.build(), HARDWARE["local-cpu"], 2)


def random_model(
    seed: int = 0, num_layers: int = LAYERS, std: float = 0.3, relations: Sequence[str] = RELATIONS
) -> ContextModel:
    """A network that corrects."""
    torch.manual_seed(seed)
    model = ContextModel(num_layers=num_layers, relations=relations)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def random_network(std: float = 0.3) -> ContextNetwork:
    """The mean of two, with something of each level."""
    return mean_network([random_model(seed, std=std) for seed in (0, 1)], (0.9, 0.7, 0.4))


def loaded(folder: Path) -> ContextNetwork:
    """The context network of a predictor's folder."""
    found = load_context(folder)
    assert isinstance(found, ContextNetwork)
    return found
