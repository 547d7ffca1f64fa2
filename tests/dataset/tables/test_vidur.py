"""Vidur: layers of tensor-parallel ranks in fp16, and collectives in bytes."""

from pathlib import Path

import pytest

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract

_SIZES = "n_head,n_kv_head,n_embd,n_expanded_embd,vocab_size,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
_OPS = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "mlp_up_proj", "mlp_act")
_LLAMA = (*_OPS, "mlp_down_proj", "add", "post_attention_layernorm")


def _header(ops: tuple[str, ...]) -> str:
    return ",".join(f"time_stats.{op}.median" for op in ops) + f",{_SIZES}\n"


class TestLayer(TableReaderContract):
    format = "vidur"
    place = "compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv.gz"
    text = _header(_LLAMA) + 2 * (
        "0.117,0.052,0.246,0.05,0.161,0.86,0.12,0.42,0.057,0.053,32,8,4096,14336,128256,True,4096,4\n"
    )

    def test_sizes_are_a_ranks(self, table: Measurements) -> None:
        """A quarter of 32 heads and 8 key heads of 128; gate and up in one; the repeated row is a copy."""
        assert dict(zip(table.works, (table.seconds * 1e6).round().tolist(), strict=True)) == {
            Op("embedding", (4096, 4096, 32064), "fp16"): 117,
            Op("rms_norm", (4096, 4096), "fp16"): 53,
            Op("linear", (4096, (8 + 2 * 2) * 128, 4096), "fp16"): 246,
            Op("rope", (4096 * 10 * 128,), "fp16"): 50,
            Op("linear", (4096, 4096, 1024), "fp16"): 161,
            Op("linear", (4096, 2 * 3584, 4096), "fp16"): 860,
            Op("swiglu", (4096 * 3584,), "fp16"): 120,
            Op("linear", (4096, 4096, 3584), "fp16"): 420,
            Op("add", (4096 * 4096,), "fp16"): 57,
        }
        assert len(table) == 10 and table.skipped == {"equal in all to another row": 10}
        assert set(table.device) == {"a100-sxm-80gb"}


class TestParallelLayer(TableReaderContract):
    """Phi-2: attention and MLP side by side, one norm, and two additions under one name."""

    format = "vidur"
    place = "compute/h100/microsoft/phi-2/mlp.csv"
    text = (
        _header((*_OPS, "mlp_down_proj", "add"))
        + "0.14,0.04,0.65,0.09,0.23,0.86,0.12,0.77,0.078,32,32,2560,10240,51200,False,4096,1\n"
    )

    def test_its_addition_is_left_out(self, table: Measurements) -> None:
        kinds = [work.kind for work in table.works]
        assert "add" not in kinds and kinds.count("layer_norm") == 1 and "gelu" in kinds
        assert table.skipped == {"two additions timed as one": 1}


_NETWORK = ",time_stats.all_reduce.median,rank,num_workers,size,collective,devices_per_node,max_devices_per_node\n"


class TestAllReduce(TableReaderContract):
    format = "vidur"
    place = "network/a100_dgx/all_reduce.csv.gz"
    text = _NETWORK + "0,0.675,0,8,67108864,all_reduce,8,8\n1,7.193,0,16,67108864,all_reduce,8,8\n"

    def test_bytes_and_nodes(self, table: Measurements) -> None:
        """64 MiB over 8 devices of one node and over 16 of two, the latter on a network of its own."""
        assert table.works == tuple(Collective("all_reduce", 67108864, ranks, 8) for ranks in (8, 16))
        assert table.seconds.tolist() == pytest.approx([675e-6, 7193e-6])
        assert table.fabric == ("dgx-a100", "vidur-a100-dgx")


class TestSendRecv(TableReaderContract):
    format = "vidur"
    place = "network/h100_dgx/send_recv.csv"
    text = _NETWORK.replace("all_reduce", "send_recv") + "0,1.871,0,2,67108864,send_recv,1,8\n"

    def test_one_device_each_on_two_nodes(self, table: Measurements) -> None:
        assert table.works == (Collective("send_recv", 67108864, 2, 1),)


def test_a_known_copy_is_left_out(tmp_path: Path) -> None:
    """The H100's file of pairs is the A100's, byte by byte."""
    path = tmp_path / "h100_pairwise_nvlink" / "send_recv.csv"
    path.parent.mkdir()
    path.write_text(TestSendRecv.text)
    table = read_table("vidur", path)
    assert len(table) == 0 and table.skipped == {"a copy of the A100's file": 1}
