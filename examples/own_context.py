"""Train a graph network of one's own on traced segments, and predict a job with it.

    stepsight dataset runs/mine --out graphs
    stepsight train runs/mine --out predictor --context none
    python examples/own_context.py graphs JOB predictor

The job runs on the hardware of the traces.  A context model is a function ``model(graph, alone) -> seconds``.  A
``torch.nn.Module`` gets ``HeteroData`` with the features of ``TraceGraphs``, so that what it learned from traces holds
for jobs.  ``stepsight.testing.ContextModelContract`` checks one, and ``tests/examples`` applies it to this.
"""

import sys

import torch
from torch.nn.functional import silu, smooth_l1_loss
from torch_geometric.nn import SAGEConv

from stepsight.dataset import TraceGraphs

ORDER = ("op", "stream_order", "op")


class AfterWhat(torch.nn.Module):
    """A factor from 1/2 to 2 for each op, from its features and those of the op before it on its stream."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", rows.mean(dim=0))
        self.register_buffer("scale", rows.std(dim=0) + 1e-3)
        self.hear = SAGEConv(rows.shape[1], 16)
        self.decode = torch.nn.Linear(16, 1)

    def log_factor(self, graph) -> torch.Tensor:
        """``(ops,)``."""
        own = (graph["op"].x - self.mean) / self.scale
        hidden = silu(self.hear(own, graph[ORDER].edge_index))
        return torch.tanh(self.decode(hidden)[:, 0]) * torch.log(torch.tensor(2.0))

    def forward(self, graph, alone: torch.Tensor) -> torch.Tensor:
        """Seconds of each node in its segment, from those alone, both in the order of issue."""
        factors, place = torch.ones_like(alone), graph["op"].node
        factors[place] = self.log_factor(graph).exp()
        return alone * factors


def fit(graphs: TraceGraphs, epochs: int = 30) -> AfterWhat:
    """Train on the ops whose seconds alone and in context are known."""
    torch.manual_seed(0)
    model = AfterWhat(torch.cat([graph["op"].x for graph in graphs]))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(epochs):
        for graph in graphs:
            alone, inside = graph["op"].y.T
            known = alone.isfinite() & inside.isfinite()
            if known.any():
                optimizer.zero_grad()
                smooth_l1_loss((alone + model.log_factor(graph))[known], inside[known], beta=0.1).backward()
                optimizer.step()
    return model.eval()


if __name__ == "__main__":
    import stepsight

    folder, job, saved = sys.argv[1:]
    predictor = stepsight.Predictor.load(saved)
    for each in (predictor, predictor.with_context(fit(TraceGraphs(folder, scope="segment")))):
        print(stepsight.predict(job, each))
