"""torchrec's sharded embedding tables in a fake world, where FBGEMM's kernels find no memory.

A module with shards of a plan stands in for ``ShardedEmbeddingBagCollection``.  Its step is torchrec's: lengths and
indices travel to the ranks of the shards, one call of batched lookups, sums travel back and are waited for where they
are used (of tables that are cut by rows they are added up on the way), and the lookups' backward steps the optimizer.
Values are unknown, so that all features have as many indices as the batch has on average, and rows are drawn evenly.
"""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base import annotate
from ..base.patching import patch
from ..ops.composite import conjugate

# Elements of an optimizer's state for a row: this many for each of its elements, and more; other optimizers have none.
_STATES = {"RowWiseAdagrad": (0, 1), "Adagrad": (1, 0), "LarsSGD": (1, 0), "Adam": (2, 0), "LAMB": (2, 0)}
_STATES |= {"PartialRowWiseAdam": (1, 1), "PartialRowWiseLAMB": (1, 1)}

_WHOLE = ("table_wise", "column_wise", "table_column_wise")  # types whose shards hold all rows


class _Shard(NamedTuple):
    """A shard of a table; ``share``: its rows, of the table's; ``features`` are looked up in it."""

    rank: int
    rows: int
    dim: int
    share: float
    features: int


class _Exchange:
    """The way of sums to their samples, and of their gradients back: ``split`` sums, or (None) added up by rows."""

    def __init__(self, sent: list[int] | None, received: list[int], group: Any) -> None:
        self.sent, self.received, self.group = sent, received, group
        self.work: Any = None
        self.back: Tensor | None = None

    def start(self, sums: Tensor, *, back: bool) -> Tensor:
        """Begin one of both ways."""
        if self.sent is None:
            call = dist.all_gather_into_tensor if back else dist.reduce_scatter_tensor
            out = sums.new_empty(sums.shape[0] * self.group.size() if back else sums.shape[0] // self.group.size())
            self.work = call(out, sums, group=self.group, async_op=True)
        else:
            sent, received = (self.received, self.sent) if back else (self.sent, self.received)
            out = sums.new_empty(sum(received))
            self.work = dist.all_to_all_single(out, sums, received, sent, group=self.group, async_op=True)
        return out

    def arrived(self, shape: torch.Size) -> Tensor:
        """Gradients that came back, once they are here."""
        self.work.wait()
        assert self.back is not None
        return self.back.view(shape)

    def ended(self, sums: Tensor) -> Tensor:
        """Sums that have arrived."""
        self.work.wait()
        return sums.view_as(sums)

    def start_back(self, grad: Tensor) -> Tensor:
        """Begin the way of gradients back."""
        self.back = self.start(grad.contiguous(), back=True)
        return grad


# Sums leave; in backward, their gradients have arrived.
_Begin = conjugate("_Begin", lambda x, way, _: way.start(x.reshape(-1), back=False), lambda _, way, at: way.arrived(at))
# Sums have arrived; in backward, their gradients leave.
_End = conjugate("_End", lambda sums, way: way.ended(sums), lambda grad, way: way.start_back(grad))


class _Lookup(torch.autograd.Function):
    """One call of batched lookups, whose backward steps the rows; ``anchor`` asks for a gradient, and gets none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, tables: _Tables, dims: tuple[int, ...], width: int) -> Tensor:
        ctx.tables, ctx.dims = tables, dims
        with annotate.op("table_lookup", dims, tables.dtype):
            return ids.new_empty(dims[2] // dims[4], width, dtype=tables.dtype).zero_().add_(ids.sum())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        with annotate.op("table_lookup_backward", (*ctx.dims, ctx.tables.state), ctx.tables.dtype):
            for weights in ctx.tables.buffers():
                weights.copy_(weights)
        return (None,) * 5


class _Tables(nn.Module):
    """Stands in for torchrec's sharded collection: shards of this rank as buffers, which nobody else trains."""

    def __init__(self, module: Any, plan: dict[str, Any], env: Any, device: torch.device) -> None:
        super().__init__()
        configs = {config.name: config for config in module.embedding_bag_configs()}
        self.names, self.group = module._embedding_names, env.process_group
        self.rank, self.world = env.rank, env.world_size
        self.widths = [config.embedding_dim for config in configs.values() for _ in config.feature_names]
        weights = dict(module.embedding_bags.named_parameters())
        self.dtype = next(iter(weights.values())).dtype
        steps = {each.__name__ for weight in weights.values() for each in getattr(weight, "_optimizer_classes", ())}
        self.ahead = False  # whether indices of the next batch travel beside this one
        self.copies = nn.ModuleList()  # of replicated tables, one for each feature
        self.shards, self.row_shards = list[_Shard](), list[_Shard]()
        for name, placed in plan.items():
            config, count = configs[name], len(configs[name].feature_names)
            if placed.sharding_type == "data_parallel":
                table = nn.EmbeddingBag(config.num_embeddings, config.embedding_dim, mode="sum", device=device)
                self.copies.extend([table] * count)
                continue
            by_rows = "row" in placed.sharding_type
            if placed.sharding_type not in _WHOLE and not (by_rows and len(set(placed.ranks or ())) in (0, self.world)):
                raise ValueError(
                    f"table {name}: {placed.sharding_type} on {len(placed.ranks or ())} of {self.world} ranks is "
                    "not captured: place it by table, by columns, or by rows over all ranks"
                )
            for piece in placed.sharding_spec.shards:
                rows, dim = piece.shard_sizes
                shard = _Shard(piece.placement.rank(), rows, dim, rows / config.num_embeddings, count)
                (self.row_shards if by_rows else self.shards).append(shard)
        own = [shard for shard in (*self.shards, *self.row_shards) if shard.rank == self.rank]
        sizes = [_STATES.get(name, (0, 0)) for name in steps]
        self.state = max((many * shard.dim + more for many, more in sizes for shard in own), default=0)
        for number, shard in enumerate(own):
            self.register_buffer(f"rows{number}", torch.empty(shard.rows, shard.dim, dtype=self.dtype, device=device))
            self.register_buffer(f"state{number}", torch.empty(shard.rows, self.state, device=device))

    def forward(self, features: Any) -> Any:
        """Sums of a batch (a ``KeyedJaggedTensor``), to be waited for: a ``KeyedTensor``."""
        values, batch = features.values(), features.stride()
        each = values.numel() // max(len(features.keys()), 1)  # indices of a feature
        weighted = features.weights_or_none() is not None
        parts = (self.shards, self.row_shards)
        sums: Any = [self._sums(values, batch, (each, weighted), part) for part in parts if part]
        for table in self.copies:
            ids = values.new_empty(each)
            sums.append((table(ids, torch.arange(batch, device=ids.device) * each // batch), None))
        return _waited(self, sums, batch)

    def _sums(
        self, values: Tensor, batch: int, looked_up: tuple[int, bool], shards: list[_Shard]
    ) -> tuple[Tensor, _Exchange]:
        """Sums of one kind of shards; ``looked_up``: indices of a feature, and whether each has a weight."""
        each, weighted = looked_up
        lengths, indices, width = ([0] * self.world for _ in range(3))  # of each rank; the last: elements of a sum
        for shard in shards:
            lengths[shard.rank] += batch * shard.features
            indices[shard.rank] += int(each * shard.features * shard.share)
            width[shard.rank] += shard.dim * shard.features
        for sent in ([3] * self.world, lengths, indices, *([indices] if weighted else [])):  # first these sizes
            got = [sent[self.rank]] * self.world
            ids, given = values.new_empty(sum(got)), values.new_empty(sum(sent))
            dist.all_to_all_single(ids, given, got, sent, group=self.group, async_op=self.ahead)
        own = [shard for shard in shards if shard.rank == self.rank]
        samples, anchor = batch * self.world, values.new_empty(0, dtype=self.dtype).requires_grad_()
        sums = anchor.view(samples, 0)
        if own:
            tables, rows = sum(shard.features for shard in own), max(sum(shard.rows for shard in own), 1)
            bounds = max(int(-rows * math.expm1(-ids.numel() / rows)), 1), max(ids.numel(), 1)
            dims = bounds[1], max(width[self.rank] // tables, 1), samples * tables, min(bounds), tables
            sums = _Lookup.apply(anchor, ids, self, dims, width[self.rank])
        to_samples = None if shards is self.row_shards else [batch * width[self.rank]] * self.world
        exchange = _Exchange(to_samples, [batch * each for each in width], self.group)
        return _Begin.apply(sums, exchange, sums.shape), exchange


def _waited(tables: _Tables, sums: list[tuple[Tensor, _Exchange | None]], batch: int) -> Any:
    """A ``KeyedTensor`` of sums, which are waited for where it is used."""
    from torchrec.distributed.types import LazyAwaitable  # here: torchrec is being imported when this module is
    from torchrec.sparse.jagged_tensor import KeyedTensor

    class Sums(LazyAwaitable[KeyedTensor]):  # type: ignore[misc]
        def _wait_impl(self) -> Any:
            ended = [(part.reshape(-1) if way is None else _End.apply(part, way), way) for part, way in sums]
            ways = [part.split(way.received if way is not None and way.sent else part.numel()) for part, way in ended]
            joined = torch.cat([piece.view(batch, -1) for pieces in ways for piece in pieces], 1)
            return KeyedTensor(tables.names, tables.widths, joined)

    return Sums()


def _planned(self: Any, module: Any, sharders: Any = None, pg: Any = None) -> Any:
    """Each rank plans, which gives all the same; no other rank could send its plan."""
    from torchrec.distributed.sharding_plan import get_default_sharders

    return self.plan(module, get_default_sharders() if sharders is None else sharders)


def _pipelined(self: Any, *args: Any, **kwargs: Any) -> None:
    """Nothing is traced or rewritten: the tables exchange indices beside the forward."""
    for module in self._model.modules():
        if isinstance(module, _Tables):
            module.ahead = True


_REPLACED: dict[str, tuple[str, dict[str, Any]]] = {  # by module: a class, and its methods
    "torchrec.distributed.embeddingbag": (
        "EmbeddingBagCollectionSharder",
        {"shard": lambda self, module, params, env, device=None, module_fqn=None: _Tables(module, params, env, device)},
    ),
    "torchrec.distributed.planner.planners": ("EmbeddingShardingPlanner", {"collective_plan": _planned}),
    "torchrec.distributed.train_pipeline.train_pipelines": ("TrainPipelineSparseDist", {"_pipeline_model": _pipelined}),
}


def _find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """The spec of a module of torchrec, whose loader replaces methods afterwards; None for other modules."""
    if name not in _REPLACED or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
        return None
    execute, (owner, methods) = spec.loader.exec_module, _REPLACED[name]

    def exec_module(module: Any) -> None:
        execute(module)
        patch(getattr(module, owner), **methods)

    patch(spec.loader, exec_module=exec_module)
    return spec


def install_tables() -> None:
    """Let torchrec's collections be sharded in this process, if a script imports it."""
    sys.meta_path.insert(0, SimpleNamespace(find_spec=_find_spec))
