"""Tables that others published with their work: a reader for each."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.errors import TableError
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective, Op
from stepsight.dataset.tables.rows import Line, Rows, device_name, read_csv, read_text

_NEUSIGHT = ("OPName", "Latency", "Device", "Torch Version")
# A product or quotient of two tensors reads and writes what their sum does.
_ELEMENTWISE = {
    **{name: "add" for name in ("add", "sub", "mul", "div")},
    **{name: "elementwise" for name in ("tanh", "exp", "sqrt", "sigmoid", "neg", "pow")},
    "gelu": "gelu",
    "relu": "relu",
}


def read_neusight(rows: Rows) -> None:
    """NeuSight (ASPLOS'25): forward ops in FP32, milliseconds.

    Columns of a product are ``B, M, N, K`` with ``N`` the *inner* size: ``[B, M, N] @ [N, K]``, as the grids of the
    kernels show (tiles of every row cover ``M x K``).
    """
    for line in read_csv(rows, _NEUSIGHT):
        name, device = line.text("OPName").lower(), device_name(line.text("Device"))
        work = _neusight_op(name, line)
        if work is None:
            rows.skip(f"no op kind for {name}")
        elif device == "p4-pcie-8gb" and name == "linear" and "train" in rows.path.parts:
            rows.skip("a throttled device")  # a quarter of what the same device reaches in the test set
        else:
            software = f"torch {line.text('Torch Version').lstrip('p')}"
            rows.add(work, line.real("Latency") * 1e-3, device=device, software=software)


def _neusight_op(name: str, line: Line) -> Op | None:
    if name in ("linear", "bmm"):
        batch, m, inner, n = (_neusight_size(line, column) for column in "BMNK")
        if name == "bmm":
            return Op("batched_matmul", (batch, m, n, inner), "fp32")
        return Op("linear", (batch * m, n, inner), "fp32")
    if name in _ELEMENTWISE:
        return Op(_ELEMENTWISE[name], (_neusight_size(line, "B") * _neusight_size(line, "H"),), "fp32")
    if name in ("ln", "softmax"):
        return Op({"ln": "layer_norm"}.get(name, name), (_neusight_size(line, "B"), _neusight_size(line, "H")), "fp32")
    return None


def _neusight_size(line: Line, column: str) -> int:
    if column not in line.cells:
        raise line.rows.error(f"{line.text('OPName')} needs column {column}", line.number)
    return line.whole(column)


_SIMUMAX_DEVICES = {
    "a100_pcie": "a100-pcie-80gb",
    "a100": "a100-sxm-80gb",
    "h100_nvlink": "h100-sxm-80gb",
    "b200": "b200-sxm-180gb",
}
_TOLD = ("layout", "accumulate", "out_dtype", "qkv_contiguous")
_STAGES = {"fwd": "grouped_linear", "bwd_grad_act": "grouped_linear_dgrad", "bwd_grad_w": "grouped_linear_wgrad"}


def read_simumax(rows: Rows) -> None:
    """SimuMax: achieved part of the peak for each shape, backward included.

    ``seconds = FLOP / (tflops * efficiency)``, with the FLOP that SimuMax counts: of attention those of a full score
    matrix although the kernel is causal, five products of it backward
    (``simu_tools/efficency_test/test_fa_efficiency.py``, read 2026-11); an efficiency above 1 is no error there. What
    is given for bandwidths and networks is fitted, not measured.
    """
    try:
        system = json.loads(read_text(rows))
        name, tables = system["sys_name"], system["accelerator"]["op"]
    except TableError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise rows.error(f"must be JSON with sys_name and accelerator.op ({error!r:.200})") from None
    device = next((ours for start, ours in _SIMUMAX_DEVICES.items() if name.startswith(start)), device_name(name))
    for section, table in tables.items():
        shapes = table.get("accurate_efficient_factor")
        if not shapes:
            rows.skip("a fitted factor")
        else:
            _read_simumax_section(rows, section, table, device)
    for fitted in (system["accelerator"].get("bandwidth", {}), system.get("networks", {})):
        rows.skip("a fitted factor", len(fitted))


def _read_simumax_section(rows: Rows, section: str, table: dict[str, Any], device: str) -> None:
    for index, (shape, efficiency) in enumerate(table["accurate_efficient_factor"].items(), 1):
        try:
            sizes = dict(part.split("=") for part in shape.replace(" ", "").split(","))
            flops, work = _simumax_work(section, sizes)
            rate = float(table["tflops"]) * 1e12 * float(efficiency)
        except (ValueError, KeyError) as error:
            raise rows.error(f"{section} {shape!r:.80} cannot be read ({error!r:.200})", index) from None
        told = [f"{key}={sizes[key]}" for key in _TOLD if key in sizes]
        if work is None:
            rows.skip(f"{section}: no op kind for such sizes")
        else:
            seconds = flops / rate if rate > 0 else 0.0
            rows.add(work, seconds, device=device, software=" ".join(("simumax", "transformer-engine", *told)))


def _simumax_work(section: str, sizes: dict[str, str]) -> tuple[float, Op | None]:
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


# Folders of computation and of networks; both A100 and H100 of computation stream faster than PCIe cards can.
_VIDUR_DEVICES = MappingProxyType(
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
_VIDUR_SIZES = (
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_expanded_embd",
    "vocab_size",
    "num_tokens",
    "num_tensor_parallel_workers",
)


def read_vidur(rows: Rows) -> None:
    """Vidur: forward ops of a layer in fp16, and collectives; medians of few runs at 1 us resolution, milliseconds.

    ``size`` of a collective is in bytes. Where a run spans nodes, the network is the authors' own and slow.
    """
    if rows.path.name.startswith("mlp."):
        _read_vidur_layer(rows)
    else:
        _read_vidur_collective(rows, rows.path.name.split(".")[0])


def _read_vidur_layer(rows: Rows) -> None:
    folder = next((part for part in reversed(rows.path.parts) if part in _VIDUR_DEVICES), "")
    device = _VIDUR_DEVICES.get(folder, "")
    for line in read_csv(rows, (*_VIDUR_SIZES, "use_gated_mlp")):
        for name, work in _vidur_layer(line):
            column = f"time_stats.{name}.median"
            if column not in line.cells:
                if name == "post_attention_layernorm":
                    continue  # Phi-2: attention and MLP side by side, of one norm
                raise rows.error(f"a layer must have column {column}", line.number)
            if name == "add" and line.text("use_gated_mlp") != "True":
                rows.skip("two additions timed as one")  # likewise
            else:
                rows.add(work, line.real(column) * 1e-3, device=device, software="vidur sarathi-serve")


def _vidur_layer(line: Line) -> Iterator[tuple[str, Op]]:
    """Ops of one layer on a tensor-parallel rank."""
    heads, kv_heads, hidden, ffn, vocab, tokens, tp = (line.whole(name) for name in _VIDUR_SIZES)
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


def _read_vidur_collective(rows: Rows, kind: str) -> None:
    folder = rows.path.parent.name
    device = _VIDUR_DEVICES.get(folder) or device_name(folder)
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


_AICB = ("comm_type", "comm_group_size", "msg_size", "stage", "_elapsed_time")


def read_aicb(rows: Rows) -> None:
    """AICB: collectives inside a training loop, milliseconds; sizes in bytes of the gathered or whole buffer.

    A collective comes hundreds of times: the median of its calls is one measurement. What comes up to the second mark
    of an end (the model's set-up, then the first iteration) sets communicators up and is left out. Groups are within
    one node; where a group's size is not said, its bandwidths are wrong too.
    """
    device = "a100-sxm-80gb" if "a100" in rows.path.name.lower() else ""
    calls: dict[tuple[Collective, str], list[float]] = defaultdict(list)
    ends = 0
    for line in read_csv(rows, _AICB):
        kind, group = line.text("comm_type").rpartition(".")[2], line.text("comm_group_size")
        if kind == "epoch_end":
            rows.skip("the end of an iteration")
            ends += 1
        elif ends < 2 or line.text("stage").startswith("init"):
            rows.skip("up to the first iteration, which sets communicators up")
        elif kind not in COLLECTIVE_KINDS:
            rows.skip(f"no collective kind for {kind}")
        elif group == "None":
            rows.skip("no group size")
        elif line.whole("msg_size", 0) == 0:
            rows.skip("no message size")
        else:
            size = line.whole("comm_group_size", 2)
            work = Collective(kind, line.whole("msg_size"), size, size)
            calls[work, line.text("stage")].append(line.real("_elapsed_time"))
    for (work, stage), times_ms in calls.items():
        rows.skip("folded into a median", len(times_ms) - 1)
        rows.add(
            work,
            median(times_ms) * 1e-3,
            device=device,
            fabric="dgx-a100" if device else "",
            software=f"aicb in a training loop: {stage}",
        )


# All-to-all NVLink: 229 and 134 GB/s of bus bandwidth over 8 devices.
_VTRAIN_DEVICES = {"a100": "a100-sxm-80gb", "v100": "v100-sxm-32gb"}
_VTRAIN_FABRICS = {"a100": "dgx-a100", "v100": "dgx-1v"}
_VTRAIN_HEADER = "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)"


def read_vtrain(rows: Rows) -> None:
    """vTrain (MICRO'24): NCCL all-reduce tables of one node, nanoseconds.

    The number of GPUs is in the name of the file alone, the device in its folder's. Of the two times with one name the
    first is out of place, the second in place, as a training step reduces.
    """
    found = re.match(r"AR_GPU(\d+)_", rows.path.name)
    if found is None or int(found[1]) < 2:
        raise rows.error("the name must begin with AR_GPU and the number of GPUs, at least 2")
    group, folder = int(found[1]), rows.path.parent.name
    device, fabric = _VTRAIN_DEVICES.get(folder) or device_name(folder), _VTRAIN_FABRICS.get(folder, "")
    header, *lines = read_text(rows).splitlines() or [""]
    if header.strip() != _VTRAIN_HEADER:
        raise rows.error(f"the header must be {_VTRAIN_HEADER}")
    for number, line in enumerate(lines, 1):
        try:
            size_text, _, _, _, _, in_place_ns, _ = line.split(",")
            size, seconds = int(size_text), float(in_place_ns) * 1e-9
        except ValueError:
            raise rows.error(f"a row must have seven cells with sizes and times, got {line!r:.80}", number) from None
        if size < 1:
            raise rows.error(f"size must be >= 1, got {size}", number)
        work = Collective("all_reduce", size, group, group)
        rows.add(work, seconds, device=device, fabric=fabric, software="nccl-tests in-place")
