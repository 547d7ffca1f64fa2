"""Tables that torchrec shards, captured: exchanges and lookups as two ranks of torchrec 1.8 were seen to issue them.

The packages below have the names of torchrec that are replaced, so that the test needs no torchrec.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture
from stepsight.dataset.kinds.op import Collective, Op

pytest.importorskip("torch")

TABLES, DIM, BATCH, POOLING, RANKS = 4, 64, 128, 5, 2

PACKAGE = {
    "distributed/embeddingbag.py": """
        class EmbeddingBagCollectionSharder:
            def shard(self, module, params, env, device=None, module_fqn=None):
                raise RuntimeError("not replaced")
    """,
    "distributed/types.py": """
        from typing import Generic, TypeVar
        W = TypeVar("W")
        class LazyAwaitable(Generic[W]):
            def wait(self):
                return self._wait_impl()
    """,
    "sparse/jagged_tensor.py": """
        class KeyedTensor:
            def __init__(self, keys, length_per_key, values):
                self.values = values
    """,
}
SCRIPT = f"""
    import sys, torch, torch.distributed as dist
    from types import SimpleNamespace as Named
    from torch import nn
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    dist.init_process_group("nccl")
    kind, world, device = sys.argv[1], dist.get_world_size(), torch.device("cuda")
    class RowWiseAdagrad: pass
    configs = [Named(name=f"t{{i}}", num_embeddings=1000, embedding_dim={DIM}, feature_names=[f"f{{i}}"])
               for i in range({TABLES})]
    bags = nn.ModuleDict({{each.name: nn.EmbeddingBag(1000, {DIM}, device="meta") for each in configs}})
    for weight in bags.parameters():
        weight._optimizer_classes = [RowWiseAdagrad]
    module = Named(embedding_bags=bags, embedding_bag_configs=lambda: configs,
                   _embedding_names=[each.feature_names[0] for each in configs])
    def shards(at):
        parts = {{"row_wise": [(500, {DIM}, rank) for rank in range(2)], "half": [(500, {DIM}, 0), (500, {DIM}, 1)],
                  "column_wise": [(1000, 32, rank) for rank in range(2)]}}.get(kind, [(1000, {DIM}, at % world)])
        return [Named(shard_sizes=part[:2], placement=Named(rank=lambda part=part: part[2])) for part in parts]
    words = {{"half": "table_row_wise", "grid": "grid_shard", "unused": "table_wise", "weighted": "table_wise"}}
    word = words.get(kind, kind)
    plan = {{each.name: Named(sharding_type=word, ranks=sorted({{s.placement.rank() for s in shards(at)}}),
                              sharding_spec=Named(shards=shards(at))) for at, each in enumerate(configs)}}
    env = Named(process_group=dist.GroupMember.WORLD, rank=dist.get_rank(), world_size=world)
    tables = EmbeddingBagCollectionSharder().shard(module, plan, env, device)
    top = nn.Linear({TABLES * DIM}, 1, device=device)
    optimizer = torch.optim.SGD([*top.parameters(), *tables.parameters()], 0.1)
    batch = Named(values=lambda: torch.zeros({TABLES * BATCH * POOLING}, dtype=torch.long, device=device),
                  stride=lambda: {BATCH}, weights_or_none=lambda: True if kind == "weighted" else None,
                  keys=lambda: ["f"] * (2 * {TABLES} if kind == "unused" else {TABLES}))
    for step in range(3):
        top(tables(batch).wait().values).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LENGTHS, INDICES, SUMS = 8 * TABLES * BATCH, 8 * TABLES * BATCH * POOLING, 4 * TABLES * BATCH * DIM


def _captured(tmp_path: Path, kind: str, world: int = RANKS) -> tuple[Counter[str], Counter[tuple[str, int]]]:
    """How often rank 0 runs each op, and each collective by its bytes."""
    for name, text in PACKAGE.items():
        path = tmp_path / "torchrec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    graph = capture(CaptureRequest(script, (kind,), world)).ranks[0].graph
    works = [node.work for node in graph.nodes]
    ops = Counter(work.kind for work in works if isinstance(work, Op))
    return ops, Counter((work.kind, work.num_bytes) for work in works if isinstance(work, Collective))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("table_wise", {("all_to_all", LENGTHS): 1, ("all_to_all", INDICES): 1, ("all_to_all", SUMS): 2}),
        ("column_wise", {("all_to_all", 2 * LENGTHS): 1, ("all_to_all", 2 * INDICES): 1, ("all_to_all", SUMS): 2}),
        ("unused", {("all_to_all", LENGTHS): 1, ("all_to_all", INDICES // 2): 1, ("all_to_all", SUMS): 2}),
        ("weighted", {("all_to_all", LENGTHS): 1, ("all_to_all", INDICES): 2, ("all_to_all", SUMS): 2}),
        (
            "row_wise",  # each rank has half of the rows: a sum of all samples, in parts
            {("all_to_all", 2 * LENGTHS): 1, ("all_to_all", INDICES): 1, ("reduce_scatter", 2 * SUMS): 1}
            | {("all_gather", 2 * SUMS): 1},
        ),
    ],
)
def test_exchanges_of_sharded_tables_are_torchrecs(
    kind: str, expected: dict[tuple[str, int], int], tmp_path: Path
) -> None:
    ops, sent = _captured(tmp_path, kind)
    assert ops["table_lookup"] == ops["table_lookup_backward"] == 1
    assert sent == {("all_to_all", 48): 1, **expected}  # 48: three sizes for each of both ranks


def test_replicated_tables_exchange_nothing(tmp_path: Path) -> None:
    ops, sent = _captured(tmp_path, "data_parallel")
    assert ops["embedding_bag"] == TABLES and not sent


@pytest.mark.parametrize(("kind", "said"), [("half", "table_row_wise on 2"), ("grid", "grid_shard on 1")])
def test_tables_on_rows_of_some_ranks_are_refused_by_name(kind: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=rf"table t0: {said} of 8 ranks is not captured"):
        _captured(tmp_path, kind, world=8)
