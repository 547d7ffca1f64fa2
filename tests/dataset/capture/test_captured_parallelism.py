"""Expert and context parallelism, captured from plain PyTorch scripts."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.capturing_run import CaptureRequest, capture

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parents[3] / "examples/scripts"
ROWS, HIDDEN, HEADS, SIZE = 1024, 64, 4, 4

CONTEXT_PARALLEL = f"""
    import torch, torch.distributed as dist, torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", ({SIZE},), mesh_dim_names=("cp",))
    qkv = torch.nn.Linear({HIDDEN}, 3 * {HIDDEN}, bias=False, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(qkv.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(1, {ROWS}, {HIDDEN}, device="cuda", dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={{x}}):
            q, k, v = (part.unflatten(-1, ({HEADS}, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_mixture_sends_even_parts_to_all_experts() -> None:
    """Rows and their gradients go away and back; the last rank of the first's expert group is captured too."""
    asked = ("--layers", "1", "--expert-parallel", "4", "--micro-batch", "2", "--seq-len", "128", "--hidden", "256")
    captured = capture(CaptureRequest(SCRIPTS / "train_moe.py", asked, 8))
    assert [rank.rank for rank in captured.ranks] == [0, 3]
    for rank in captured.to_dict()["ranks"]:
        found = {(row["num_bytes"], row["group_size"]): row["count"] for row in rank["collectives"]
                 if row["kind"] == "all_to_all"}  # fmt: skip
        copies = 2 * 128 * 2
        assert found == {(copies * 256 * 2, 4): 4, (8 * 8, 4): 1}


def test_context_parallelism_attends_to_all_parts(tmp_path: Path) -> None:
    """The rank's own part and those of the others, each half of a square: all of them in forward and in backward."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CONTEXT_PARALLEL), "utf-8")
    (rank,) = capture(CaptureRequest(script, (), SIZE, ranks=(0,))).to_dict()["ranks"]
    assert rank["ops_by_kind"]["attention"] == rank["ops_by_kind"]["attention_backward"] == SIZE
    assert {row["group"] for row in rank["collectives"]} == {"cp"}


def test_rows_that_the_kernel_pads_are_explained(tmp_path: Path) -> None:
    """In fp32 PyTorch's kernel pads the sums that context parallelism merges, in a real run too."""
    script = tmp_path / "train.py"
    text = CONTEXT_PARALLEL.replace("torch.bfloat16", "torch.float32").replace(f"1, {ROWS},", "1, 128,")
    script.write_text(textwrap.dedent(text), "utf-8")
    with pytest.raises(CaptureError, match=r"train.py:13: .*pads its sums to 32 rows: by"):
        capture(CaptureRequest(script, (), SIZE, ranks=(0,)))


COMPILED_REPLICAS = """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (4,), mesh_dim_names=("dp",))
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
        def forward(self, x):
            return self.down(torch.nn.functional.gelu(self.up(x)))
    model = torch.compile(DistributedDataParallel(Model().to(device)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("device", "fused"), [("cuda", "fused"), ("cpu", "fused_loops")])
def test_compiled_replicas_have_fused_regions(device: str, fused: str, tmp_path: Path) -> None:
    """``torch.compile`` reads regions within DDP too, in a world that a mesh has started."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(COMPILED_REPLICAS), "utf-8")
    (rank,) = capture(CaptureRequest(script, (), 4, ranks=(0,), device=device)).to_dict()["ranks"]
    assert rank["ops_by_kind"][fused] == 3 and "gelu" not in rank["ops_by_kind"]
    assert [(row["kind"], row["num_bytes"]) for row in rank["collectives"]] == [
        ("all_reduce", 4 * (2 * 64 * 256 + 320))
    ]


UNEVEN = """
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    rank, sent = dist.get_rank(), [[8, 24], [16, 40]]
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(sum(sent[rank]), 64, device="cuda")
        got = [sent[0][rank], sent[1][rank]]
        y = torch.empty(sum(got), 64, device="cuda")
        dist.all_to_all_single(y, x, got, sent[rank])
        model(y).square().mean().backward()
        optimizer.step()
"""


def test_uneven_parts_are_as_large_as_what_is_sent_or_received(tmp_path: Path) -> None:
    """Ranks whose parts differ do not deadlock; of each rank the larger side counts."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(UNEVEN), "utf-8")
    ranks = capture(CaptureRequest(script, (), 2, ranks=(0, 1))).to_dict()["ranks"]
    assert [rank["collectives"][0]["num_bytes"] for rank in ranks] == [32 * 256, 64 * 256]


ON_THE_DEVICE = f"""
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint
    dist.init_process_group("nccl")
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear({HIDDEN}, 3 * {HIDDEN})
        def forward(self, x):
            q, k, v = (part.unflatten(-1, ({HEADS}, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    class Again(Attention):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)
    x = torch.randn(2, 64, {HIDDEN}, device="cuda")
    model = MODEL
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        BEFORE
        model(x).square().mean().backward()
        optimizer.step()
"""
NORM = "nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(64).cuda(), device_ids=[0])"


def _taken(tmp_path: Path, model: str, before: str = "pass") -> dict[str, Any]:
    script = tmp_path / "train.py"
    text = ON_THE_DEVICE.replace("MODEL", model).replace("BEFORE", before)
    script.write_text(textwrap.dedent(text), "utf-8")
    (rank,) = capture(CaptureRequest(script, (), SIZE, ranks=(0,))).to_dict()["ranks"]
    sizes = {row["kind"]: row["num_bytes"] for row in rank["collectives"]}
    return {"ops": rank["ops_by_kind"], "sizes": sizes}


def test_parts_that_look_for_a_device_find_one(tmp_path: Path) -> None:
    """A compiled and recomputed attention, FSDP with the device of its module, and a batch norm of all ranks."""
    compiled = _taken(tmp_path, "torch.compile(Again().cuda())")["ops"]
    assert compiled["attention"] == 2 and compiled["attention_backward"] == 1 and compiled["fused"]
    sharded = _taken(tmp_path, "FullyShardedDataParallel(Attention().cuda(), device_id=torch.device('cuda', 0))")
    assert sharded["sizes"]["reduce_scatter"] == 4 * 3 * HIDDEN * (HIDDEN + 1)
    norm = _taken(tmp_path, NORM)
    assert norm["ops"]["batch_norm"] == norm["ops"]["batch_norm_backward"] == 1
    assert norm["sizes"]["all_gather"] == SIZE * 4 * (2 * 64 + 1)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("torch.cuda.CUDAGraph()", "CUDA graphs are not captured"),
        ("torch.nested.nested_tensor([x[0, :3], x[0]], layout=torch.jagged) * 2", "nested tensors are not captured"),
    ],
)
def test_what_is_not_captured_is_named(before: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=message):
        _taken(tmp_path, "Attention().cuda()", before)


LARGEST = """
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    rank, rows = dist.get_rank(), [1, 2, 7, 2]
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x = torch.randn(4 * rows[rank], 64, device="cuda")
        y = torch.empty(sum(rows), 64, device="cuda")
        {exchange}
        model(y).square().mean().backward()
        optimizer.step()
"""
EXCHANGES = {
    "single": "dist.all_to_all_single(y, x, rows, [rows[rank]] * 4)",
    "functional": "y = dist._functional_collectives.all_to_all_single(x, rows, [rows[rank]] * 4, dist.group.WORLD)",
    "lists": "dist.all_to_all(list(y.split(rows)), list(x.chunk(4)))",
    "gathered": "dist.all_gather(list(y.split(rows)), x[: rows[rank]])",
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_rank_with_the_largest_part_is_captured_or_named(exchange: str, tmp_path: Path) -> None:
    """The sizes that the first rank sees say which rank sends most, whatever call exchanges them."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LARGEST.replace("{exchange}", EXCHANGES[exchange])), "utf-8")
    captured = capture(CaptureRequest(script, (), 4))
    assert 2 in [rank.rank for rank in captured.ranks] and [*captured.chosen] == [2]
    named = capture(CaptureRequest(script, (), 4, ranks=(0, 3))).to_dict()["ranks"]
    (warning,) = named[0]["warnings"]
    assert warning.startswith("rank 2 has the largest part") and warning.endswith("--ranks 0,2,3")
