"""Tables that others published with their work: a reader for each."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import repeat
from statistics import median
from typing import Any, cast

from stepsight.dataset.base.bounded import parquet_rows, parsing, read_parquet
from stepsight.dataset.base.errors import TableError
from stepsight.dataset.base.files import preset
from stepsight.dataset.kinds import benchmark_names
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective, Op
from stepsight.dataset.tables.measurements import Line, Rows, device_name, read_csv, read_text

Found = Op | Collective | str  # a reason where it is no work of ours
_NAMES = preset("table_names.toml")
_SIMUMAX, _VIDUR, _AIC = _NAMES["simumax"], _NAMES["vidur"]["devices"], _NAMES["aiconfigurator"]
_NEUSIGHT = ("OPName", "Latency", "Device", "Torch Version")


def read_neusight(rows: Rows) -> None:
    """NeuSight (ASPLOS'25): forward ops in FP32, milliseconds.

    Columns of a product are ``B, M, N, K`` with ``N`` the *inner* size: ``[B, M, N] @ [N, K]``, as the grids of the
    kernels show (tiles of every row cover ``M x K``).
    """
    for line in read_csv(rows, _NEUSIGHT):
        with rows.row(line.number):
            name, device = line.text("OPName").lower(), device_name(line.text("Device"))
            work: Found = _neusight_op(name, line) or f"no op kind for {name}"
            if device == "p4-pcie-8gb" and name == "linear" and "train" in rows.path.parts:
                work = "a throttled device"  # a quarter of what the same device reaches in the test set
            software = f"torch {line.text('Torch Version').lstrip('p')}"
            rows.add(work, line.real("Latency") * 1e-3, device=device, software=software)


_CONVOLUTION = ("B", "Input_Channel", "Output_Channel", "Input_Size", "Kernel_Szie", "Stride")  # as the tables spell it


def _neusight_op(name: str, line: Line) -> Op | None:
    def sizes(columns: Iterable[str]) -> list[int]:
        return [line.whole(column) for column in columns]

    if name in ("linear", "bmm"):
        batch, m, inner, n = sizes("BMNK")
        if name == "bmm":
            return Op("batched_matmul", (batch, m, n, inner), "fp32")
        return Op("linear", (batch * m, n, inner), "fp32")
    if kind := _NAMES["neusight"]["elementwise"].get(name):
        return Op(kind, (math.prod(sizes("BH")),), "fp32")
    if name == "conv":
        batch, ins, outs, size, kernel, stride = sizes(_CONVOLUTION)
        padded = size + 2 * line.whole("Padding", 0)
        if kernel > padded:
            raise ValueError(f"a kernel must fit into the padded positions, got {kernel} > {padded}")
        result = (padded - kernel) // stride + 1
        return Op("conv", (batch, ins, outs, result**2, kernel**2, 1, size**2, 2), "fp32")
    if name in ("ln", "softmax"):
        return Op({"ln": "layer_norm"}.get(name, name), tuple(sizes("BH")), "fp32")
    return None


_TOLD = ("layout", "accumulate", "out_dtype", "qkv_contiguous")


def read_simumax(rows: Rows) -> None:
    """SimuMax: achieved part of the peak for each shape, backward included.

    ``seconds = FLOP / (tflops * efficiency)``, with the FLOP that SimuMax counts: of attention those of a full score
    matrix although the kernel is causal, five products of it backward
    (``simu_tools/efficency_test/test_fa_efficiency.py``, read 2026-11); an efficiency above 1 is no error there. What
    is given for bandwidths and networks is fitted, not measured.
    """
    text = read_text(rows)
    with parsing(f"{rows.path}: must be JSON with sys_name and accelerator.op", TableError):
        system = json.loads(text)
        name, tables = system["sys_name"], system["accelerator"]["op"]
    known = _SIMUMAX["devices"].items()
    device = next((ours for start, ours in known if name.startswith(start)), device_name(name))
    for section, table in tables.items():
        shapes = table.get("accurate_efficient_factor") or {}
        if not shapes:
            rows.skip("a fitted factor")
        for index, (shape, efficiency) in enumerate(shapes.items(), 1):
            with rows.row(index):
                sizes = dict(part.split("=") for part in shape.replace(" ", "").split(","))
                flops, work = _simumax_work(section, sizes)
                rate = float(table["tflops"]) * 1e12 * float(efficiency)
                told = [f"{key}={sizes[key]}" for key in _TOLD if key in sizes]
                seconds, software = flops / rate if rate > 0 else 0.0, ("simumax", "transformer-engine", *told)
                why = f"{section}: no op kind for such sizes"
                rows.add(work or why, seconds, device=device, software=" ".join(software))
    for fitted in (system["accelerator"].get("bandwidth", {}), system.get("networks", {})):
        rows.skip("a fitted factor", len(fitted))


def _simumax_work(section: str, sizes: dict[str, str]) -> tuple[float, Op | None]:
    """FLOP as SimuMax counts them, and the op."""
    dtype = "fp8" if section.startswith("fp8") else "bf16"
    if section.endswith("group_matmul"):
        groups, m, n, k = (int(sizes[key]) for key in ("ng", "M", "N", "K"))  # M: rows of one group; sizes of forward
        return 2.0 * groups * m * n * k, Op(_SIMUMAX["stages"][sizes["stage"]], (groups, groups * m, n, k), dtype)
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


_VIDUR_SIZES = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "num_tokens")
_VIDUR_DEGREE = "num_tensor_parallel_workers"


def read_vidur(rows: Rows) -> None:
    """Vidur: forward ops of a layer in fp16, and collectives; medians of few runs at 1 us resolution, milliseconds.

    ``size`` of a collective is in bytes. Where a run spans nodes, the network is the authors' own and slow.
    """
    if not rows.path.name.startswith("mlp."):
        _read_vidur_collective(rows, rows.path.name.split(".")[0])
        return
    folder = next((part for part in reversed(rows.path.parts) if part in _VIDUR), "")
    for line in read_csv(rows, (*_VIDUR_SIZES, _VIDUR_DEGREE, "use_gated_mlp")):
        with rows.row(line.number):
            for name, work in _vidur_layer(line).items():
                column, found = f"time_stats.{name}.median", cast(Found, work)
                if name == "post_attention_layernorm" and column not in line.cells:
                    continue  # Phi-2: attention and MLP side by side, of one norm
                if name == "add" and line.text("use_gated_mlp") != "True":
                    found = "two additions timed as one"  # likewise
                device = _VIDUR.get(folder, "")
                rows.add(found, line.real(column) * 1e-3, device=device, software="vidur sarathi-serve")


def _vidur_layer(line: Line) -> dict[str, Op]:
    """Ops of one layer on a tensor-parallel rank."""
    heads, kv_heads, hidden, ffn, vocab, tokens = (line.whole(name) for name in _VIDUR_SIZES)
    tp, gated = line.whole(_VIDUR_DEGREE), line.text("use_gated_mlp") == "True"
    if hidden % heads or heads % tp or ffn % tp:
        raise ValueError(f"n_head and tp must divide the sizes, got {heads} and {tp} for {hidden}, {heads} and {ffn}")
    size, own_heads, own_kv, own_ffn = hidden // heads, heads // tp, max(1, kv_heads // tp), ffn // tp
    norm = ("rms_norm" if gated else "layer_norm", tokens, hidden)
    layer: dict[str, tuple[Any, ...]] = {
        "emb": ("embedding", tokens, hidden, -(-vocab // tp)),
        "input_layernorm": norm,
        "attn_pre_proj": ("linear", tokens, (own_heads + 2 * own_kv) * size, hidden),
        "attn_rope": ("rope", tokens * (own_heads + own_kv) * size),
        "attn_post_proj": ("linear", tokens, hidden, own_heads * size),
        "post_attention_layernorm": norm,
        "mlp_up_proj": ("linear", tokens, own_ffn * (2 if gated else 1), hidden),
        "mlp_act": ("swiglu" if gated else "gelu", tokens * own_ffn),
        "mlp_down_proj": ("linear", tokens, hidden, own_ffn),
        "add": ("add", tokens * hidden),
    }
    return {name: Op(kind, tuple(dims), "fp16") for name, (kind, *dims) in layer.items()}


def _read_vidur_collective(rows: Rows, kind: str) -> None:
    folder, time = rows.path.parent.name, f"time_stats.{kind}.median"
    name, device = folder.replace("_", "-"), _VIDUR.get(folder) or device_name(folder)
    for line in read_csv(rows, (time, "num_workers", "size", "devices_per_node")):
        with rows.row(line.number):
            ranks, per_node = line.whole("num_workers"), line.whole("devices_per_node")
            work = Collective(kind, line.whole("size"), ranks, min(per_node, ranks))
            fabric = _NAMES["vidur"]["one_node"].get(folder) or name if work.num_nodes == 1 else f"vidur-{name}"
            copied = (folder, kind) == ("h100_pairwise_nvlink", "send_recv")
            found = "a copy of the A100's file" if copied else work
            rows.add(found, line.real(time) * 1e-3, device=device, fabric=fabric, software="nccl")


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
        ends += kind == "epoch_end"
        if kind == "epoch_end":
            rows.skip("the end of an iteration")
        elif ends < 2 or line.text("stage").startswith("init"):
            rows.skip("up to the first iteration, which sets communicators up")
        elif kind not in COLLECTIVE_KINDS or group == "None":
            rows.skip("no group size" if kind in COLLECTIVE_KINDS else f"no collective kind for {kind}")
        else:
            with rows.row(line.number):
                if num_bytes := line.whole("msg_size", 0):
                    work = Collective(kind, num_bytes, *[line.whole("comm_group_size", 2)] * 2)
                    calls[work, line.text("stage")].append(line.real("_elapsed_time"))
                else:
                    rows.skip("no message size")
    for (work, stage), times_ms in calls.items():
        rows.skip("folded into a median", len(times_ms) - 1)
        fabric, software = "dgx-a100" if device else "", f"aicb in a training loop: {stage}"
        rows.add(work, median(times_ms) * 1e-3, device=device, fabric=fabric, software=software)


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
    known = _NAMES["vtrain"]
    device, fabric = known["devices"].get(folder) or device_name(folder), known["fabrics"].get(folder, "")
    header, *lines = read_text(rows).splitlines() or [""]
    if header.strip() != _VTRAIN_HEADER:
        raise rows.error(f"the header must be {_VTRAIN_HEADER}")
    for number, line in enumerate(lines, 1):
        with rows.row(number):
            cells = line.split(",")
            if len(cells) != 7:
                raise ValueError(f"a row must have seven cells with sizes and times, got {line!r:.80}")
            work = Collective("all_reduce", _sizes(int(cells[0]))[0], group, group)
            rows.add(work, float(cells[5]) * 1e-9, device=device, fabric=fabric, software="nccl-tests")


def _sizes(*sizes: int) -> tuple[int, ...]:
    if min(sizes) < 1:
        raise ValueError(f"sizes must be >= 1, got {sizes}")
    return sizes


def _aic_attention(dtype: str, told: str, kv_dtype: str, *numbers: int) -> Found:
    batch, length, heads, kv_heads, size, step, window = numbers
    if kv_dtype != told:
        return "keys and values in another dtype"
    if step:
        return "attention onto a prefix"
    if 0 < window < length:
        return "a window narrower than the sequence"
    return Op("attention", (*_sizes(batch, heads, kv_heads or heads, length, length, size), 1), dtype)


def _aic_moe(dtype: str, told: str, *cells: Any) -> Found:
    tokens, hidden, inter, top_k, experts, tp, ep, distribution = cells
    if ep > 1:
        return "experts of which some are on other ranks"
    if distribution != "balanced":
        return "experts loaded unevenly"
    if top_k == 22 or inter == 1856:  # Nemotron 3 (squared ReLU)
        return "experts of a model whose MLP has no gate"
    tokens, hidden, inter, top_k, experts, tp = _sizes(tokens, hidden, inter, top_k, experts, tp)
    copies = tokens * top_k
    return Op("grouped_linear", (min(experts, copies), copies, 3 * inter // tp, hidden), dtype)


# By table, what makes work of the dtype as ops have it, of the dtype as it is told and of the other cells.
_AIC_WORK: dict[str, Callable[..., Found]] = {
    "gemm": lambda dtype, told, *mnk: Op("linear", _sizes(*mnk), dtype),
    "context_attention": _aic_attention,
    "encoder_attention": lambda dtype, told, b, length, h, d: Op(
        "attention", (*_sizes(b, h, h, length, length, d), 0), dtype
    ),
    "moe": _aic_moe,
    "nccl": lambda dtype, told, kind, num, elements: (
        Collective(benchmark_names()[kind], elements * _AIC["nccl_bytes"][told], num, num)
        if kind in benchmark_names()
        else f"no collective kind for {kind}"
    ),
}
_AIC_OPTIONAL = ("window_size", "step")  # 0 where they are missing
_AIC_TEXTS = ("framework", "version", "device", "kernel_source", "op_name", "distribution")


def read_aiconfigurator(rows: Rows) -> None:
    """aiconfigurator (NVIDIA): kernels of inference engines and NCCL within a node, milliseconds.

    Forward only.  ``message_size`` of a collective is in *elements* of its dtype.  Attention with a window narrower
    than the sequence, onto a longer prefix, or with keys in another dtype than queries is none of our ops.  ``moe``
    times the experts' whole MLP; it is told as one grouped product with the same FLOP and weights (``n = 3 *
    inter_size``: gate, up and down), which leaves the activation between them out of the account; experts of other
    ranks (``moe_ep_size > 1``) are left out, since how many rows reached those here is not said, and so are uneven
    loads.
    """
    table = rows.path.name.removesuffix(".parquet").removesuffix("_perf")
    if table not in _AIC_WORK:
        rows.skip(f"{table}: no op of a training step", parquet_rows(rows.path))
        return
    found = read_parquet(rows.path)
    what, columns = _AIC["tables"][table]
    every = (*_AIC_TEXTS[:4], "latency", *columns.split())
    if missing := [name for name in every if name not in found.column_names and name not in _AIC_OPTIONAL]:
        raise rows.error(f"the table must have columns {', '.join(every)}; {', '.join(missing)} missing")
    cells = [found[name].to_pylist() if name in found.column_names else repeat(0, len(found)) for name in every]
    for index, row in enumerate(zip(*cells, strict=True), 1):
        with rows.row(index):
            framework, version, told_device, kernel, latency_ms, told, *others = map(_cell, every, row)
            device = device_name(told_device)
            if told not in _AIC["nccl_bytes" if table == "nccl" else "dtypes"]:
                work: Found = f"{what} in {told}"
            else:
                work = _AIC_WORK[table](_AIC["dtypes"].get(told, ""), told, *others)
            software, fabric = f"{framework} {version} {kernel}{' fp8_block' if told == 'fp8_block' else ''}", ""
            if isinstance(work, Collective):
                software, fabric = f"nccl {version} {told}", _AIC["fabrics"].get(device, "")
            rows.add(work, latency_ms * 1e-3, device=device, fabric=fabric, software=software)


def _cell(name: str, value: Any) -> Any:
    """A cell as a text, a size or, of the latency, milliseconds, NaN where it is empty."""
    if name == "latency":
        return math.nan if value is None else float(value)
    if name in _AIC_TEXTS or name.endswith("dtype"):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a text, got {value!r:.80}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} must be a whole number, got {value!r:.80}")
    return int(value)
