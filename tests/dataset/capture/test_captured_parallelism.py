"""Expert and context parallelism, captured from plain PyTorch scripts."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

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
