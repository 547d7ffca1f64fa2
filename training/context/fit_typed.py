"""Fitting a network on typed graphs: on seconds of nodes, on seconds of whole graphs, or on both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Batch, HeteroData

from stepsight.gnn.concurrency_network import ConcurrencyForm, ConcurrencyNetwork
from stepsight.gnn.typed_network import EdgeType, NetworkForm, TypedNetwork, both_directions

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TypedFit:
    """Architecture and training settings of a network.

    Attributes:
        readout: Type of the nodes whose seconds it answers.
        relations: Names of the types of edges that it hears; None: all; empty: it is a sum over nodes.
        node_types: Types of nodes that it sees; None: all.
        node_weight: Of the loss on nodes.
        total_weight: Of the loss on whole graphs.
        head, channels, layers, rest, bound: See ``NetworkForm``.
        concurrency: One of ``concurrency_network.WAYS``: a ``ConcurrencyNetwork``; empty: a ``TypedNetwork``.
        epochs: Passes over the graphs.
        batches: Steps of an epoch.
        rate: Largest learning rate.
        decay: Of the weights.
        delta: Log units; larger errors count linearly.
    """

    readout: str = "op"
    relations: tuple[str, ...] | None = None
    node_types: tuple[str, ...] | None = None
    node_weight: float = 1.0
    total_weight: float = 0.0
    head: str = "factor"
    channels: int = 32
    layers: int = 2
    rest: bool = False
    bound: float = 2.0
    concurrency: str = ""
    epochs: int = 80
    batches: int = 4
    rate: float = 0.005
    decay: float = 0.05
    delta: float = 0.1


class FittedNetwork:
    """A trained network."""

    def __init__(self, network: TypedNetwork | ConcurrencyNetwork, fit: TypedFit) -> None:
        self.network, self.fit = network, fit

    def seconds(self, graphs: Sequence[HeteroData]) -> tuple[list[Array], Array]:
        """Seconds of the nodes of each graph, and of each graph, ``(graphs,)``."""
        batch = Batch.from_data_list([_seen(each, self.fit) for each in graphs])
        with torch.no_grad():
            nodes = self.network(batch)
            totals = self.network.totals(batch, nodes)
        counts = np.cumsum([each[self.fit.readout].num_nodes for each in graphs])[:-1]
        return np.split(nodes.double().numpy(), counts), totals.double().numpy()


def fit_typed(graphs: Sequence[HeteroData], fit: TypedFit, seed: int = 0) -> FittedNetwork:
    """Train a network.

    Args:
        graphs: Each with ``baseline`` on the nodes of type ``readout``, and ``seconds`` (NaN: unknown) and ``weight``
            of these nodes, or ``total`` (and ``total_weight``) of the graph.
        fit: How.
        seed: Of the weights and of the order.
    """
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        seen = [_seen(each, fit) for each in graphs]
        order = list(range(len(seen)))
        random.Random(seed).shuffle(order)
        count = max(1, min(fit.batches, len(seen) // 4))
        batches = [Batch.from_data_list([seen[place] for place in order[part::count]]) for part in range(count)]
        whole = Batch.from_data_list(seen)
        network = _network(whole, fit)
        network.set_support(whole)
        _train(network, batches, fit, seed)
        return FittedNetwork(network.eval(), fit)
    finally:
        torch.random.set_rng_state(state)
        torch.set_num_threads(threads)


def _train(network: TypedNetwork | ConcurrencyNetwork, batches: Sequence[Batch], fit: TypedFit, seed: int) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=fit.rate, weight_decay=fit.decay)
    steps = fit.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, fit.rate, total_steps=steps, pct_start=0.2)
    order = random.Random(seed)
    for _ in range(fit.epochs):
        for batch in order.sample(list(batches), len(batches)):
            optimizer.zero_grad()
            _loss(network, batch, fit).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def _loss(network: TypedNetwork | ConcurrencyNetwork, batch: Batch, fit: TypedFit) -> Tensor:
    seconds = network(batch)
    loss: Tensor = seconds.new_zeros(())
    nodes = batch[fit.readout]
    if fit.node_weight and "seconds" in nodes:
        known = torch.isfinite(nodes.seconds)
        loss = loss + fit.node_weight * _log_loss(seconds[known], nodes.seconds[known], nodes.weight[known], fit.delta)
    if fit.total_weight and "total" in batch:
        weight = batch.total_weight if "total_weight" in batch else torch.ones_like(batch.total)
        loss = loss + fit.total_weight * _log_loss(network.totals(batch, seconds), batch.total, weight, fit.delta)
    return loss


def _log_loss(seconds: Tensor, measured: Tensor, weight: Tensor, delta: float) -> Tensor:
    off = functional.huber_loss(seconds.log(), measured.log(), reduction="none", delta=delta) / delta
    loss: Tensor = (weight * off).sum() / weight.sum().clamp(min=1e-12)
    return loss


def _seen(graph: HeteroData, fit: TypedFit) -> HeteroData:
    """The parts of a graph that the network may see, with edges in both directions."""
    seen = graph.clone()
    types = set(graph.node_types) if fit.node_types is None else {*fit.node_types, fit.readout}
    for kind in graph.edge_types:
        hidden = fit.relations is not None and kind[1] not in fit.relations
        if hidden or not {kind[0], kind[2]} <= types:
            del seen[kind]
    for name in set(graph.node_types) - types:
        del seen[name]
    return both_directions(seen) if seen.edge_types and not fit.concurrency else seen


def _network(graphs: HeteroData, fit: TypedFit) -> TypedNetwork | ConcurrencyNetwork:
    if not fit.concurrency:
        return TypedNetwork(_form(graphs, fit))
    edges: dict[EdgeType, int] = {
        kind: graphs[kind].edge_attr.shape[1] for kind in graphs.edge_types if kind[2] == fit.readout
    }
    nodes = {name: graphs[name].x.shape[1] for name in dict.fromkeys([fit.readout, *(kind[0] for kind in edges)])}
    hardware = int(graphs.hardware.max()) if "hardware" in graphs else 0
    return ConcurrencyNetwork(ConcurrencyForm(fit.readout, nodes, edges, fit.concurrency, fit.channels, hardware))


def _form(graphs: HeteroData, fit: TypedFit) -> NetworkForm:
    nodes = {name: graphs[name].x.shape[1] for name in graphs.node_types}
    edges: dict[EdgeType, int] = {kind: graphs[kind].edge_attr.shape[1] for kind in graphs.edge_types}
    parts = graphs[fit.readout].parts.shape[1] if "parts" in graphs[fit.readout] else 1
    return NetworkForm(fit.readout, nodes, edges, fit.head, fit.channels, fit.layers, parts, fit.bound, fit.rest)
