"""Tables that others published are read as their authors mean them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract

_NEUSIGHT = "OPName,Latency,Device,Torch Version,Kernel Name,B,M,N,K,H\n"


class TestNeusight(TableReaderContract):
    format = "neusight"
    place = "train/collect/linear/p2.1.0/NVIDIA A100-PCIE-40GB.csv.gz"
    text = (
        _NEUSIGHT + "linear,260.086,NVIDIA A100-PCIE-40GB,p2.1.0,sgemm_128x32,1,6219,54377,5256,\n"
        "bmm,80.3231,NVIDIA A100-PCIE-40GB,p2.1.0,sgemm,868,986,754,979,\n"
        "mul,0.0253,NVIDIA A100-PCIE-40GB,p2.1.0,k,127,,,,168\n"
        "ln,0.0469,NVIDIA A100-PCIE-40GB,p2.1.0,k,60,,,,272\n"
        "fft,0.9,NVIDIA A100-PCIE-40GB,p2.1.0,k,38,,,,1\n"
        "tanh,0,NVIDIA A100-PCIE-40GB,p2.1.0,k,127,,,,168\n"
    )

    def test_the_inner_size_is_n(self, table: Measurements) -> None:
        """A linear of 42 x 195 tiles of 128 x 32 puts out 6219 x 5256; times are milliseconds."""
        assert table.works == (
            Op("linear", (6219, 5256, 54377), "fp32"),
            Op("batched_matmul", (868, 986, 979, 754), "fp32"),
            Op("add", (127 * 168,), "fp32"),
            Op("layer_norm", (60, 272), "fp32"),
        )
        assert table.seconds[2] == pytest.approx(25.3e-6)
        assert set(table.device) == {"a100-pcie-40gb"} and set(table.software) == {"torch 2.1.0"}
        assert table.skipped == {"no op kind for fft": 1, "no time": 1}


class TestConvolutions(TableReaderContract):
    """As the kernel moves over the padded image, by steps of the stride."""

    format = "neusight"
    place = "train/collect/conv/p2.1.0/Tesla T4.csv"
    text = (
        "OPName,Latency,Device,Torch Version,B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding\n"
        "conv,0.88,Tesla T4,p2.1.0,38,893,326,3,5,1,1\nconv,0.9,Tesla T4,p2.1.0,8,3,64,7,224,2,3\n"
        "conv,0.1,Tesla T4,p2.1.0,8,16,32,1,10,2,0\n"
    )

    def test_positions_follow_kernel_stride_and_padding(self, table: Measurements) -> None:
        assert table.works == (
            Op("conv", (38, 893, 326, 25, 9, 1, 25, 2), "fp32"),
            Op("conv", (8, 3, 64, 112**2, 49, 1, 224**2, 2), "fp32"),
            Op("conv", (8, 16, 32, 25, 1, 1, 100, 2), "fp32"),
        )


class TestThrottled(TableReaderContract):
    """The P4 of the training set was throttled in linears alone."""

    format = "neusight"
    place = "train/collect/linear/p2.1.0/Tesla P4.csv"
    text = _NEUSIGHT + "linear,9.0,Tesla P4,p2.1.0,k,1,512,512,512,\nrelu,0.05,Tesla P4,p2.1.0,k,64,,,,64\n"

    def test_its_linears_are_left_out(self, table: Measurements) -> None:
        assert table.works == (Op("relu", (4096,), "fp32"),) and table.skipped == {"a throttled device": 1}


_SDP = "batch=1, seq_len=4096, head_num=32, kv_head_num=8, qk_head_dim={}, v_head_dim=128, qkv_contiguous=True"
_GROUP = "ng=40, M=616, N=3072, K=5120, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32, stage={}, accumulate=False"


def _table(**shapes: float) -> dict[str, object]:
    return {"tflops": 312, "efficient_factor": 0.75, "accurate_efficient_factor": shapes}


class TestSimumax(TableReaderContract):
    format = "simumax"
    place = "configs/system/a100_pcie.json.gz"
    text = json.dumps(
        {
            "sys_name": "a100_pcie_bf16",
            "accelerator": {
                "op": {
                    "default": {"tflops": 312, "efficient_factor": 0.75},
                    "matmul": _table(
                        **{
                            "b=1, m=4096, k=5120, n=1536, layout=TN, accumulate=False, out_dtype=bf16": 0.8,
                            "b=1, m=4096, k=1536, n=5120, layout=NN, accumulate=False, out_dtype=bf16": 0.7,
                            "b=1, m=1536, k=4096, n=5120, layout=NT, accumulate=True, out_dtype=fp32": 0.6,
                        }
                    ),
                    "group_matmul": _table(**{_GROUP.format("bwd_grad_w"): 0.5}),
                    "sdp_fwd": _table(**{_SDP.format(128): 1.13}),
                    "sdp_bwd": _table(**{_SDP.format(128): 0.97, _SDP.format(192): 0.8}),
                },
                "bandwidth": {"default": {}, "ce": {}},
            },
            "networks": {"inter_node": {}},
        }
    )

    def test_all_three_layouts_are_one_linears(self, table: Measurements) -> None:
        """Forward, gradient of the input and of the weight of a linear from 5120 to 1536, by their own sizes."""
        dims = (4096, 1536, 5120)
        kinds = ("linear", "linear_dgrad", "linear_wgrad")
        assert table.works[:3] == tuple(Op(kind, dims) for kind in kinds)
        flops = 2 * 4096 * 1536 * 5120
        assert table.seconds[:3].tolist() == pytest.approx([flops / (312e12 * part) for part in (0.8, 0.7, 0.6)])

    def test_groups_are_counted_together(self, table: Measurements) -> None:
        assert table.works[3] == Op("grouped_linear_wgrad", (40, 40 * 616, 3072, 5120))
        assert table.seconds[3] == pytest.approx(2 * 40 * 616 * 3072 * 5120 / 156e12)

    def test_attention_is_counted_in_full_though_causal(self, table: Measurements) -> None:
        """Two products of 32 x 4096 x 4096 x 128 forward, five backward: an efficiency of 1.13 is 0.57 of ours."""
        product = 2 * 32 * 4096**2 * 128
        assert table.works[4:] == (
            Op("attention", (1, 32, 8, 4096, 4096, 128, 1)),
            Op("attention_backward", (1, 32, 8, 4096, 4096, 128, 1)),
        )
        assert table.seconds[4:].tolist() == pytest.approx([2 * product / 352.56e12, 5 * product / 302.64e12])

    def test_what_was_fitted_is_left_out(self, table: Measurements) -> None:
        assert table.skipped == {"a fitted factor": 4, "sdp_bwd: no op kind for such sizes": 1}
        assert set(table.device) == {"a100-pcie-80gb"}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000 + "]" * 10_000,
        json.dumps({"sys_name": 3, "accelerator": {"op": {"matmul": _table(x=1.0)}}}),
        json.dumps({"sys_name": "a100", "accelerator": {"op": [1]}}),
        json.dumps({"sys_name": "a100", "accelerator": {"op": {"sdp_fwd": _table(**{_SDP.format("9" * 400): 1.0})}}}),
    ],
)
def test_what_is_no_table_is_one_line(tmp_path: Path, text: str) -> None:
    """However deep, of whatever types, however large."""
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TableError, match=r"^[^\n]*a\.json[^\n]*$"):
        read_table("simumax", tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[" * 10**5)
    with pytest.raises(TableError, match=r"accelerator\.op: it is nested thousands deep$"):
        read_table("simumax", tmp_path / "a.json")


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


_AICB = "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count\n"
_END = "CommType.epoch_end,None,None,0,,None,None,,433.2,0,0,1\n"


def _call(kind: str, group: object, size: int, stage: str, milliseconds: float) -> str:
    return f"CommType.{kind},CommGroup.tp_group,{group},{size},{stage},None,None,,{milliseconds},0,0,1\n"


class TestAicb(TableReaderContract):
    format = "aicb"
    place = "A100_example.csv.gz"
    text = (
        _AICB
        + _call("all_reduce", 4, 8, "init.model_setup", 3380.2)
        + _END
        + _call("all_gather", 2, 16777216, "forward.MLP", 59.5)
        + _END
        + "".join(_call("all_gather", 2, 16777216, "forward.MLP", time) for time in (0.131, 0.135, 0.4))
        + _call("all_gather", "None", 134217728, "forward.MoE", 0.5)
        + _call("all_reduce", 2, 0, "step", 0.15)
        + _call("barrier", 2, 8, "step", 0.15)
    )

    def test_a_collective_is_its_median(self, table: Measurements) -> None:
        """Set-up and the first iteration are left out; sizes are bytes of the gathered buffer."""
        assert table.works == (Collective("all_gather", 16777216, 2, 2),)
        assert table.seconds.tolist() == pytest.approx([135e-6])
        assert table.skipped == {
            "up to the first iteration, which sets communicators up": 2,
            "the end of an iteration": 2,
            "folded into a median": 2,
            "no group size": 1,
            "no message size": 1,
            "no collective kind for barrier": 1,
        }


class TestVtrain(TableReaderContract):
    format = "vtrain"
    place = "trace/a100/AR_GPU8_1M_1024M_LUT"
    text = (
        "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n"
        "1048576,262144,float,92790,19.78,92150,19.91\n"
        "1073741824,268435456,float,8192800,229.35,8196400,229.25\n"
    )

    def test_in_place_nanoseconds(self, table: Measurements) -> None:
        """The second time is in place; the name says how many devices."""
        assert table.works == tuple(Collective("all_reduce", size, 8, 8) for size in (2**20, 2**30))
        assert table.seconds.tolist() == pytest.approx([92.15e-6, 8196.4e-6])
        assert set(table.device) == {"a100-sxm-80gb"} and set(table.fabric) == {"dgx-a100"}
        assert 2**30 / table.seconds[1] * 2 * 7 / 8 == pytest.approx(229.25e9, rel=1e-3)  # as it says itself

    def test_a_name_without_devices_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "LUT").write_text(self.text)
        with pytest.raises(TableError, match="AR_GPU and the number"):
            read_table("vtrain", tmp_path / "LUT")


def _parquet(**columns: list[Any]) -> bytes:
    rows = len(columns["latency"])
    told = {"framework": "SGLang", "version": "0.5.14", "device": "NVIDIA H100 80GB HBM3", "kernel_source": "fa3"}
    buffer = io.BytesIO()
    pq.write_table(pa.table({**{name: [text] * rows for name, text in told.items()}, **columns}), buffer)
    return buffer.getvalue()


class ParquetContract(TableReaderContract):
    format = "aiconfigurator"
    columns: ClassVar[dict[str, list[Any]]]

    def content(self) -> bytes:
        return _parquet(**self.columns)


class TestGemm(ParquetContract):
    place = "data/h100_sxm/gemm/sglang/0.5.14/gemm_perf.parquet"
    columns: ClassVar = {
        "gemm_dtype": ["bfloat16", "fp8", "fp8_block", "nvfp4", "bfloat16"],
        "m": [4096] * 5,
        "n": [1024] * 5,
        "k": [2048] * 5,
        "latency": [0.05, 0.03, 0.04, 0.02, 0.0],
    }

    def test_fp8_is_a_dtype_and_four_bits_are_not(self, table: Measurements) -> None:
        assert table.works == tuple(Op("linear", (4096, 1024, 2048), dtype) for dtype in ("bf16", "fp8", "fp8"))
        assert table.seconds.tolist() == pytest.approx([50e-6, 30e-6, 40e-6])
        assert table.software[1:] == ("SGLang 0.5.14 fa3", "SGLang 0.5.14 fa3 fp8_block")
        assert table.skipped == {"weights in nvfp4": 1, "no time": 1}

    def test_a_row_with_a_wrong_cell_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "gemm_perf.parquet"
        path.write_bytes(_parquet(**{**self.columns, "m": [4096, 0, None, 4.5, 1], "latency": [1.0] * 5}))
        table = read_table("aiconfigurator", path)
        assert len(table) == 2 and table.skipped == {
            "sizes must be >= 1, got (0, 1024, 2048) (the first in row 2)": 1,
            "m must be a whole number, got None (the first in row 3)": 2,
        }


class TestContextAttention(ParquetContract):
    place = "data/h100_sxm/attention/sglang/0.5.14/context_attention_perf.parquet"
    columns: ClassVar = {
        "attn_dtype": ["bfloat16"] * 5,
        "kv_cache_dtype": ["bfloat16", "bfloat16", "fp8", "bfloat16", "bfloat16"],
        "batch_size": [2] * 5,
        "isl": [4096] * 5,
        "num_heads": [32] * 5,
        "num_key_value_heads": [8] * 5,
        "head_dim": [128] * 5,
        "step": [0, 0, 0, 512, 0],
        "window_size": [0, 128, 0, 0, 8192],
        "latency": [1.5, 0.4, 1.4, 2.0, 1.6],
    }

    def test_whole_causal_prompts_alone(self, table: Measurements) -> None:
        """A window wider than the prompt changes nothing."""
        assert table.works == (Op("attention", (2, 32, 8, 4096, 4096, 128, 1)),) * 2
        assert table.skipped == {
            "a window narrower than the sequence": 1,
            "keys and values in another dtype": 1,
            "attention onto a prefix": 1,
        }


class TestEncoderAttention(ParquetContract):
    place = "encoder_attention_perf.parquet"
    columns: ClassVar = {
        "attn_dtype": ["bfloat16"],
        "batch_size": [8],
        "isl": [1024],
        "num_heads": [16],
        "head_dim": [72],
        "latency": [0.3],
    }

    def test_it_is_not_causal(self, table: Measurements) -> None:
        assert table.works == (Op("attention", (8, 16, 16, 1024, 1024, 72, 0)),)


class TestMoe(ParquetContract):
    place = "moe_perf.parquet"
    columns: ClassVar = {
        "moe_dtype": ["bfloat16", "bfloat16", "bfloat16", "bfloat16", "int4_wo"],
        "num_tokens": [4096, 2, 4096, 4096, 4096],
        "hidden_size": [4096] * 5,
        "inter_size": [14336] * 5,
        "topk": [2] * 5,
        "num_experts": [8] * 5,
        "moe_tp_size": [4, 1, 1, 1, 1],
        "moe_ep_size": [1, 1, 2, 1, 1],
        "distribution": ["balanced", "balanced", "balanced", "power_law_1.2", "balanced"],
        "latency": [2.0, 0.9, 3.0, 4.0, 3.0],
    }

    def test_gate_up_and_down_are_told_as_one_product(self, table: Measurements) -> None:
        """Two copies of 4096 rows through a quarter of three times 14336; two rows reach four experts."""
        assert table.works == (
            Op("grouped_linear", (8, 8192, 10752, 4096)),
            Op("grouped_linear", (4, 4, 43008, 4096)),
        )
        assert table.skipped == {
            "experts of which some are on other ranks": 1,
            "experts loaded unevenly": 1,
            "weights in int4_wo": 1,
        }


class TestNccl(ParquetContract):
    place = "data/h100_sxm/comm/nccl/2.29.2/nccl_perf.parquet"
    columns: ClassVar = {
        "op_name": ["all_gather", "all_gather", "alltoall", "broadcast_x"],
        "nccl_dtype": ["half", "int8", "half", "half"],
        "num_gpus": [8, 8, 4, 8],
        "message_size": [1024, 1024, 4096, 1024],
        "latency": [0.01, 0.009, 0.02, 0.01],
    }

    def test_sizes_are_elements(self, table: Measurements) -> None:
        """1024 halves are 2048 bytes of the gathered output."""
        assert table.works == (
            Collective("all_gather", 2048, 8, 8),
            Collective("all_gather", 1024, 8, 8),
            Collective("all_to_all", 8192, 4, 4),
        )
        assert set(table.fabric) == {"dgx-h100"} and table.software[0] == "nccl 0.5.14 half"


def test_tables_of_no_training_step_are_counted(tmp_path: Path) -> None:
    """DeepEP's and others' rows are skipped by their number."""
    (tmp_path / "wideep_deepep_normal_perf.parquet").write_bytes(_parquet(latency=[1.0, 2.0]))
    table = read_table("aiconfigurator", tmp_path)
    assert len(table) == 0 and table.skipped == {"wideep_deepep_normal: no op of a training step": 2}
