"""SimuMax: achieved part of the peak for each shape, backward included.

``seconds = FLOP / (tflops * efficiency)``, with the FLOP that SimuMax counts: of attention those of a full score matrix
although the kernel is causal, five products of it backward (``simu_tools/efficency_test/test_fa_efficiency.py``, read
2026-11); an efficiency above 1 is no error there.  What is given for bandwidths and networks is fitted, not measured.
"""

from __future__ import annotations

import json
from typing import Any

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tables.device_names import device_name
from stepsight.dataset.tables.rows import Rows, read_text

_DEVICES = {
    "a100_pcie": "a100-pcie-80gb",
    "a100": "a100-sxm-80gb",
    "h100_nvlink": "h100-sxm-80gb",
    "b200": "b200-sxm-180gb",
}
_TOLD = ("layout", "accumulate", "out_dtype", "qkv_contiguous")
_STAGES = {"fwd": "grouped_linear", "bwd_grad_act": "grouped_linear_dgrad", "bwd_grad_w": "grouped_linear_wgrad"}


def read(rows: Rows) -> None:
    try:
        system = json.loads(read_text(rows))
        name, tables = system["sys_name"], system["accelerator"]["op"]
    except TableError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise rows.error(f"must be JSON with sys_name and accelerator.op ({error!r:.200})") from None
    device = next((ours for start, ours in _DEVICES.items() if name.startswith(start)), device_name(name))
    for section, table in tables.items():
        shapes = table.get("accurate_efficient_factor")
        if not shapes:
            rows.skip("a fitted factor")
        else:
            _read_section(rows, section, table, device)
    for fitted in (system["accelerator"].get("bandwidth", {}), system.get("networks", {})):
        rows.skip("a fitted factor", len(fitted))


def _read_section(rows: Rows, section: str, table: dict[str, Any], device: str) -> None:
    for index, (shape, efficiency) in enumerate(table["accurate_efficient_factor"].items(), 1):
        try:
            sizes = dict(part.split("=") for part in shape.replace(" ", "").split(","))
            flops, work = _work(section, sizes)
            rate = float(table["tflops"]) * 1e12 * float(efficiency)
        except (ValueError, KeyError) as error:
            raise rows.error(f"{section} {shape!r:.80} cannot be read ({error!r:.200})", index) from None
        told = [f"{key}={sizes[key]}" for key in _TOLD if key in sizes]
        if work is None:
            rows.skip(f"{section}: no op kind for such sizes")
        else:
            seconds = flops / rate if rate > 0 else 0.0
            rows.add(work, seconds, device=device, software=" ".join(("simumax", "transformer-engine", *told)))


def _work(section: str, sizes: dict[str, str]) -> tuple[float, Op | None]:
    """FLOP as SimuMax counts them, and the op."""
    dtype = "fp8" if section.startswith("fp8") else "bf16"
    if section.endswith("group_matmul"):
        groups, m, n, k = (int(sizes[key]) for key in ("ng", "M", "N", "K"))  # M: rows of one group; sizes of forward
        return 2.0 * groups * m * n * k, Op(_STAGES[sizes["stage"]], (groups, groups * m, n, k), dtype)
    if section.endswith("matmul"):
        batch, m, k, n = (int(sizes[key]) for key in "bmkn")  # of this very product: [m, k] x [k, n]
        kind, dims = {
            "TN": ("linear", (m, n, k)),
            "NN": ("linear_dgrad", (m, k, n)),  # k: what forward puts out, n: what it takes in
            "NT": ("linear_wgrad", (k, m, n)),  # k: rows
        }[sizes["layout"]]
        return 2.0 * batch * m * n * k, Op(kind, dims, dtype) if batch == 1 else None
    names = ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    batch, length, heads, kv_heads, qk, v = (int(sizes[key]) for key in names)
    kind, products = {"sdp_fwd": ("attention", 2), "sdp_bwd": ("attention_backward", 5)}[section]
    flops = float(products) * batch * length**2 * max(heads, kv_heads) * (qk + v)
    if qk == v:
        return flops, Op(kind, (batch, heads, kv_heads, length, length, qk, 1), dtype)
    mla = Op(f"mla_{kind}", (batch, heads, length, length, qk, v, 1), dtype) if heads == kv_heads else None
    return flops, mla
