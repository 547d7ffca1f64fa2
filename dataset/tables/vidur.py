"""Vidur: forward ops of a layer in fp16, and collectives; medians of few runs at 1 us resolution, milliseconds.

``size`` of a collective is in bytes.  Where a run spans nodes, the network is the authors' own and slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.tables.device_names import device_name
from stepsight.dataset.tables.rows import Line, Rows, read_csv

# Folders of computation and of networks; both A100 and H100 of computation stream faster than PCIe cards can.
_DEVICES = MappingProxyType(
    {
        "a100": "a100-sxm-80gb",
        "h100": "h100-sxm-80gb",
        "a40": "a40-pcie-48gb",
        "a100_dgx": "a100-sxm-80gb",
        "h100_dgx": "h100-sxm-80gb",
        "a100_pairwise_nvlink": "a100-pcie-80gb",
        "h100_pairwise_nvlink": "h100-nvl-94gb",
        "a40_pairwise_nvlink": "a40-pcie-48gb",
    }
)
_ONE_NODE = MappingProxyType({"a100_dgx": "dgx-a100", "h100_dgx": "dgx-h100"})
_SIZES = (
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_expanded_embd",
    "vocab_size",
    "num_tokens",
    "num_tensor_parallel_workers",
)


def read(rows: Rows) -> None:
    if rows.path.name.startswith("mlp."):
        _read_layer(rows)
    else:
        _read_collective(rows, rows.path.name.split(".")[0])


def _read_layer(rows: Rows) -> None:
    folder = next((part for part in reversed(rows.path.parts) if part in _DEVICES), "")
    device = _DEVICES.get(folder, "")
    for line in read_csv(rows, (*_SIZES, "use_gated_mlp")):
        for name, work in _layer(line):
            column = f"time_stats.{name}.median"
            if column not in line.cells:
                if name == "post_attention_layernorm":
                    continue  # Phi-2: attention and MLP side by side, of one norm
                raise rows.error(f"a layer must have column {column}", line.number)
            if name == "add" and line.text("use_gated_mlp") != "True":
                rows.skip("two additions timed as one")  # likewise
            else:
                rows.add(work, line.real(column) * 1e-3, device=device, software="vidur sarathi-serve")


def _layer(line: Line) -> Iterator[tuple[str, Op]]:
    """Ops of one layer on a tensor-parallel rank."""
    heads, kv_heads, hidden, ffn, vocab, tokens, tp = (line.whole(name) for name in _SIZES)
    if hidden % heads or heads % tp or ffn % tp:
        raise line.rows.error(f"n_head {heads} and tp {tp} must divide {hidden}, {heads} and {ffn}", line.number)
    gated = line.text("use_gated_mlp") == "True"
    size, own_heads, own_ffn = hidden // heads, heads // tp, ffn // tp
    own_kv = max(1, kv_heads // tp)
    norm = Op("rms_norm" if gated else "layer_norm", (tokens, hidden), "fp16")
    yield "emb", Op("embedding", (tokens, hidden, -(-vocab // tp)), "fp16")
    yield "input_layernorm", norm
    yield "attn_pre_proj", Op("linear", (tokens, (own_heads + 2 * own_kv) * size, hidden), "fp16")
    yield "attn_rope", Op("rope", (tokens * (own_heads + own_kv) * size,), "fp16")
    yield "attn_post_proj", Op("linear", (tokens, hidden, own_heads * size), "fp16")
    yield "post_attention_layernorm", norm
    yield "mlp_up_proj", Op("linear", (tokens, own_ffn * (2 if gated else 1), hidden), "fp16")
    yield "mlp_act", Op("swiglu" if gated else "gelu", (tokens * own_ffn,), "fp16")
    yield "mlp_down_proj", Op("linear", (tokens, hidden, own_ffn), "fp16")
    yield "add", Op("add", (tokens * hidden,), "fp16")


def _read_collective(rows: Rows, kind: str) -> None:
    folder = rows.path.parent.name
    device = _DEVICES.get(folder) or device_name(folder)
    time = f"time_stats.{kind}.median"
    for line in read_csv(rows, (time, "num_workers", "size", "devices_per_node")):
        if (folder, kind) == ("h100_pairwise_nvlink", "send_recv"):
            rows.skip("a copy of the A100's file")
            continue
        ranks, per_node = line.whole("num_workers"), line.whole("devices_per_node")
        work = Collective(kind, line.whole("size"), ranks, min(per_node, ranks))
        here = _ONE_NODE.get(folder) or folder.replace("_", "-")
        fabric = here if work.num_nodes == 1 else f"vidur-{folder.replace('_', '-')}"
        rows.add(work, line.real(time) * 1e-3, device=device, fabric=fabric, software="nccl")
