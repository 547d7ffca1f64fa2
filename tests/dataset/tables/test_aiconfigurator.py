"""aiconfigurator: kernels of inference engines, and messages counted in elements."""

import io
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract


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

    def test_a_size_of_zero_is_refused_by_its_row(self, tmp_path: Path) -> None:
        path = tmp_path / "gemm_perf.parquet"
        path.write_bytes(_parquet(**{**self.columns, "m": [4096, 0, 1, 1, 1]}))
        with pytest.raises(TableError, match="row 2: sizes must be >= 1"):
            read_table("aiconfigurator", path)


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
