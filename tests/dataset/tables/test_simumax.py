"""SimuMax: efficiencies to times, layouts to forward's and backward's products."""

import json
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables import Measurements, read_table
from stepsight.testing import TableReaderContract

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
