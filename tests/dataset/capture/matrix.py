"""The matrix of captures: scripts of every strategy with every feature; ``python -m tests.dataset.capture.matrix``.

It captures all of them and writes the table of ``docs/reference/captures.md``, which the tests compare with what they
find.  A cell works if its matrix products, attention and collectives are those of a hand calculation.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture

PAGE = Path(__file__).parents[3] / "docs/reference/captures.md"
WORKS = "works"
WORLD, NODE, PARTS = 4, 2, 2  # ranks, ranks of a node, micro-batches
BATCH, LENGTH, WIDTH, HEADS, INNER, VOCABULARY, BLOCKS = 4, 128, 256, 4, 512, 1000, 2

_MODEL = f"""
import os
import torch, torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

B, L, D, V = {BATCH}, {LENGTH}, {WIDTH}, {VOCABULARY}
FEATURE = "FEATURE_NAME"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, {INNER}), nn.Linear({INNER}, D)
        self.bias = nn.Parameter(torch.zeros({HEADS}, L, L)) if FEATURE == "bias" else None
    def attend(self, q, k, v):
        mask = self.bias.to_local() if hasattr(self.bias, "to_local") else self.bias
        if FEATURE == "mask":
            mask = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
        if FEATURE == "backend":
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    def body(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, D // {HEADS})).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))
    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if FEATURE == "checkpoint" else self.body(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, D, sparse=FEATURE == "sparse")
        self.blocks = nn.ModuleList(Block() for _ in range({BLOCKS}))
        self.head = nn.Linear(D, V)
    def forward(self, x):
        x = self.table(x) if self.table is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x

def loss_of(y, target):
    return F.cross_entropy(y.flatten(0, 1), target.flatten())
"""
_INITIALISED = 'dist.init_process_group("nccl")\n'
_OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
_LOOP = f"""
scaler = torch.amp.GradScaler("cuda", enabled=FEATURE == "amp")
parts = {PARTS} if FEATURE == "accumulation" else 1
if FEATURE == "compile":
    model = torch.compile(model)
for step in range(3):
    for part in range(parts):
        x = torch.randint(V, (B, L), device="cuda")
        with held(part == parts - 1), torch.autocast("cuda", torch.float16, enabled=FEATURE == "amp"):
            loss = loss_of(model(x), x)
        with held(part == parts - 1):
            scaler.scale(loss / parts).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
_NOT_HELD = "held = lambda last: nullcontext()\n"
_HELD_GRADIENTS = """
@__import__("contextlib").contextmanager
def held(last):
    model.set_requires_gradient_sync(last)
    yield
"""
_SHARDED = (
    """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cuda", MESH, mesh_dim_names=NAMES)
model = Model().cuda()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
"""
    + _HELD_GRADIENTS
)
_TENSOR = (
    f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
)
mesh = init_device_mesh("cuda", ({WORLD},), mesh_dim_names=("tp",))
model = Model().cuda()
tables = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
heads = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
parallelize_module(model, mesh, {{"table": tables, "head": heads}})
for block in model.blocks:
    inner = RowwiseParallel(output_layouts=Shard(1))
    plan = {{"norm": SequenceParallel(use_local_output=True), "out": inner, "down": inner}}
    plan |= dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=Shard(1)))
    parallelize_module(block, mesh, plan)
    if block.bias is not None:
        block.bias = nn.Parameter(distribute_tensor(block.bias.detach(), mesh, [Shard(0)]))
"""
    + _NOT_HELD
)
_PIPELINE = f"""
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
rank, stages = dist.get_rank(), dist.get_world_size()
model = Model().cuda()
model.blocks = model.blocks[rank * {BLOCKS} // stages:(rank + 1) * {BLOCKS} // stages]
if rank > 0:
    model.table = None
if rank < stages - 1:
    model.head = None
if FEATURE == "compile":
    model.compile()
stage = PipelineStage(model, rank, stages, torch.device("cuda"))
parts = {PARTS} if FEATURE == "accumulation" else 1
scaler = torch.amp.GradScaler("cuda", enabled=FEATURE == "amp")
scaler.scale(torch.zeros((), device="cuda"))
schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: scaler.scale(loss_of(y, target)) / parts)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    for part in range(parts):
        x = torch.randint(V, (B, L), device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=FEATURE == "amp"):
            schedule.step(*([x] if rank == 0 else []), **({{"target": x}} if rank == stages - 1 else {{}}))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
_UNEVEN = """
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel
rank, world = dist.get_rank(), dist.get_world_size()
tables = nn.ModuleList(nn.EmbeddingBag(V, D, sparse=FEATURE == "sparse") for _ in range(rank + 1)).cuda()
class Exchange(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = Model()
        self.dense.table = None
        self.join = nn.Linear(D * world * (world + 1) // 2, D)
    def forward(self, rows):
        got = torch.cat([part.view(B, -1) for part in rows.split([B * D * (other + 1) for other in range(world)])], 1)
        return self.dense(self.join(got)[:, None].expand(B, L, D))
dense = DistributedDataParallel(Exchange().cuda())
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables, self.dense = tables, dense
    def forward(self, x):
        rows = torch.randint(V, (B * world, 8), device="cuda")
        mine = torch.cat([table(rows) for table in self.tables], 1).flatten()
        sizes = [B * D * (other + 1) for other in range(world)]
        out = mine.new_empty(sum(sizes))
        return self.dense(all_to_all_single(out, mine, sizes, [B * D * (rank + 1)] * world))
model = Whole()
held = lambda last: nullcontext() if last else dense.no_sync()
"""

STRATEGIES = {
    "plain": 'model = Model().cuda()\n' + _NOT_HELD + _OPTIMIZER + _LOOP,
    "DDP": _INITIALISED + """
model = nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[torch.cuda.current_device()])
replica = model
held = lambda last: nullcontext() if last else replica.no_sync()
""" + _OPTIMIZER + _LOOP,
    "FSDP2": _SHARDED.replace("MESH", f"({WORLD},)").replace("NAMES", '("dp",)') + _OPTIMIZER + _LOOP,
    "HSDP": _SHARDED.replace("MESH", f"({WORLD // NODE}, {NODE})").replace("NAMES", '("replica", "shard")')
    + _OPTIMIZER + _LOOP,
    "TP": _TENSOR + _OPTIMIZER + _LOOP,
    "PP": _INITIALISED + _PIPELINE,
    "DDP + uneven all-to-all": _INITIALISED + _UNEVEN + _OPTIMIZER + _LOOP,
}  # fmt: skip
FEATURES = {
    "eager": "eager", "torch.compile": "compile", "AMP with GradScaler": "amp",
    "activation checkpointing": "checkpoint",
    "sparse embeddings": "sparse", "SDPA with a mask": "mask", "SDPA with a learnt bias": "bias",
    "SDPA with a chosen backend": "backend", "gradient accumulation": "accumulation",
}  # fmt: skip


CELLS = tuple((strategy, feature) for strategy in STRATEGIES for feature in FEATURES)

_ROWS, _HEAD_BYTES = BATCH * LENGTH, BATCH * LENGTH * WIDTH * 4
_BLOCK = 4 * (WIDTH + 1) * WIDTH + 2 * WIDTH + 2 * WIDTH * INNER + INNER + WIDTH  # parameters
_ENDS = VOCABULARY * WIDTH + (WIDTH + 1) * VOCABULARY  # of the table and the head
_INPUTS = WORLD * (WORLD + 1) // 2  # tables of all ranks


def flops_of(strategy: str, feature: str) -> float:
    """FLOP of one rank, of a pipeline all stages."""
    attention = 4 * BATCH * LENGTH**2 * WIDTH
    linear = 2 * _ROWS * (4 * WIDTH**2 + 2 * WIDTH * INNER)
    total = BLOCKS * (3 * linear + 3.5 * attention) + 3 * 2 * _ROWS * WIDTH * VOCABULARY
    if strategy == "DDP + uneven all-to-all":
        total += 3 * 2 * BATCH * _INPUTS * WIDTH**2
    if FEATURES[feature] == "checkpoint":  # all of a block but its last product
        total += BLOCKS * (linear + attention - 2 * _ROWS * WIDTH * INNER)
    return total * (PARTS if FEATURES[feature] == "accumulation" else 1) / (WORLD if strategy == "TP" else 1)


def collectives_of(strategy: str, feature: str) -> dict[int, Counter[str]]:
    """Bytes of each kind of collective, by rank; of tensor parallelism their number, and no all-gathers."""
    short = FEATURES[feature]
    parts = PARTS if short == "accumulation" else 1
    block = 4 * (_BLOCK + (HEADS * LENGTH**2 if short == "bias" else 0))
    whole = BLOCKS * block + 4 * _ENDS
    found = Counter[str]()
    if strategy == "DDP":
        found["all_reduce"] = whole
    elif strategy in ("FSDP2", "HSDP"):
        found |= {"all_gather": parts * (2 * BLOCKS * block + 4 * _ENDS), "reduce_scatter": whole}
        found["all_reduce"] = (whole // NODE if strategy == "HSDP" else 0) + 4 * (short == "amp")
    elif strategy == "TP":
        found |= {"reduce_scatter": parts * (BLOCKS * 6 + 2) + (BLOCKS if short == "checkpoint" else 0)}
        found["all_reduce"] = 2 * BLOCKS  # weights and biases of the norms
    elif strategy == "PP":
        return {rank: Counter(send_recv=2 * parts * _HEAD_BYTES) for rank in range(BLOCKS)}
    elif strategy == "DDP + uneven all-to-all":
        found["all_reduce"] = whole - 4 * VOCABULARY * WIDTH + 4 * (_INPUTS * WIDTH + 1) * WIDTH
        sent = {0: _INPUTS, WORLD - 1: WORLD * WORLD}  # received, and sent
        return {rank: found | Counter(all_to_all=2 * parts * 4 * BATCH * WIDTH * n) for rank, n in sent.items()}
    return {0: +found}


def outcome(strategy: str, feature: str) -> str:
    """``works``, also with what the user is told, or the sentence with which a script is refused.

    Raises:
        AssertionError: If what was captured differs from the hand calculation.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(_MODEL.replace("FEATURE_NAME", FEATURES[feature]) + STRATEGIES[strategy], "utf-8")
        size = {"plain": 1, "PP": BLOCKS}.get(strategy, WORLD)
        try:
            ranks = capture(CaptureRequest(script, (), size, NODE)).to_dict()["ranks"]
        except CaptureError as error:
            (sentence,) = str(error).splitlines()
            return re.sub(r"^train.py:\d+: (\w+: )?| \[rank .*", "", sentence)
    _check(strategy, feature, ranks)
    compiled = FEATURES[feature] == "compile" and not any("fused" in rank["ops_by_kind"] for rank in ranks)
    told = {"no region is compiled"} if compiled else set[str]()
    told |= {re.sub(r"^train.py:\d+ ", "", text) for rank in ranks for text in rank["warnings"]}
    return "; ".join([WORKS, *sorted(told)])


def _check(strategy: str, feature: str, ranks: list[dict[str, Any]]) -> None:
    flops = sum(rank["flops"] for rank in ranks) / (1 if strategy == "PP" else len(ranks))
    assert flops == flops_of(strategy, feature), (flops, flops_of(strategy, feature))
    assert not any(rank["unknown_ops"] for rank in ranks)
    assert "fused" not in ranks[0]["ops_by_kind"] or FEATURES[feature] == "compile"
    for rank in ranks:
        found = Counter[str]()
        for row in rank["collectives"]:
            found[row["kind"]] += row["count"] * (1 if strategy == "TP" else row["num_bytes"])
        if strategy == "TP":
            assert found.pop("all_gather")
        assert found == collectives_of(strategy, feature)[rank["rank"]], found


def page_of(found: Mapping[tuple[str, str], str]) -> str:
    """The table of the page, and the sentences below it."""
    texts = list(dict.fromkeys(text for text in found.values() if text != WORKS))
    rows = [["", *FEATURES], ["---"] * (len(FEATURES) + 1)]
    for strategy in STRATEGIES:
        cells = [found[strategy, feature] for feature in FEATURES]
        shown = [WORKS if text.startswith(WORKS) else "refused" for text in cells]
        notes = [f" ({texts.index(text) + 1})" if text in texts else "" for text in cells]
        rows.append([strategy, *(one + two for one, two in zip(shown, notes, strict=True))])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    numbered = [f"{number}. `{text.removeprefix(WORKS + '; ')}`" for number, text in enumerate(texts, 1)]
    return "\n".join([*lines, "", *numbered, ""])


def page_cells() -> dict[tuple[str, str], str]:
    """What the page says of each cell."""
    text = PAGE.read_text("utf-8")
    notes = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.M))
    found = {}
    for line in re.findall(r"^\| (\w.*) \|$", text, re.M):
        strategy, *cells = line.split(" | ")
        for feature, (word, number) in zip(
            FEATURES, (re.findall(r"\w+", cell + " 0")[:2] for cell in cells), strict=True
        ):
            note = notes.get(number, "")
            found[strategy, feature] = "; ".join(filter(None, [WORKS, note])) if word == WORKS else note
    return found


def main() -> int:
    """Write the page anew; 1 if a cell is not as it was."""
    before, found = page_cells(), {}
    for cell in CELLS:
        try:
            found[cell] = outcome(*cell)
        except AssertionError as error:
            found[cell] = f"another result than that of a hand calculation: {error}"
        changed = "" if found[cell] == before.get(cell) else "  CHANGED"
        print(f"{' x '.join(cell):60} {found[cell]}{changed}", flush=True)
    text = PAGE.read_text("utf-8")
    head = text[: text.index("\n| ")] if "\n| " in text else text.rstrip() + "\n"
    PAGE.write_text(f"{head}\n{page_of(found)}", "utf-8")
    return int(found != before)


if __name__ == "__main__":
    sys.exit(main())
