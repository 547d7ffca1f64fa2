"""GPT-2 inference over data x tensor x pipeline parallelism x micro-batches, or 12 programs measured on 2 ranks.

The experiment of DistIR.  The models are exported without weights.  For the measurement two ranks of gloo run what the
predicted programs hold: kernels by the harness's calls, collectives and messages at once, waiting where the programs
wait.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.graph.program import Program
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.tensors.program import TensorProgram
from stepsight.experiments.reports.text_table import table_of
from stepsight.experiments.search.model_grid import model_grid
from stepsight.experiments.studies.study import Options, Row, Study, cases, figures_text
from stepsight.training.fitting.train_runs import spearman
from stepsight.training.prediction.captured_prediction import predict_captured
from stepsight.training.predictor.predictor import Predictor

RANKS, ROUNDS = 2, 120
WAYS: Mapping[str, Callable[[TensorProgram], TensorProgram]] = {
    "data": lambda program: program.replicate(RANKS),
    "tensor": lambda program: program.split(RANKS),
    "pipeline, 2 micro-batches": lambda program: program.cut(RANKS, 2),
    "pipeline, 4 micro-batches": lambda program: program.cut(RANKS, 4),
}


def write_model(path: Path, sizes: Mapping[str, int]) -> None:
    """Export a model of PyTorch without weights: with ``vocab`` a GPT-2, with ``heads`` an encoder, else an MLP."""
    import torch
    from torch import nn

    width, num_layers = sizes["hidden"], sizes["layers"]
    shape = [sizes[name] for name in ("batch", "seq_len", "hidden") if name in sizes]

    def encoder(norm: nn.Module | None = None) -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            width, sizes["heads"], 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        return nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False)

    class Gpt2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(sizes["vocab"], width), nn.Embedding(sizes["seq_len"], width)
            self.layers, self.head = encoder(nn.LayerNorm(width)), nn.Linear(width, sizes["vocab"], bias=False)

        def forward(self, tokens: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(sizes["seq_len"])
            return self.head(self.layers(self.tokens(tokens) + self.places.weight, mask, is_causal=True))

    with torch.device("meta"):
        if "heads" in sizes:
            model = Gpt2() if "vocab" in sizes else encoder()
        else:
            pairs = pairwise([width, 4 * width] * num_layers + [width])
            model = nn.Sequential(*(each for ins, outs in pairs for each in (nn.Linear(ins, outs), nn.ReLU())))
        given = torch.zeros(shape[:2], dtype=torch.long) if "vocab" in sizes else torch.zeros(shape)
        torch.export.save(torch.export.export(model, (given,)), path)


def _step(program: Program, rank: int, pool: Any) -> Callable[[], None]:
    """What runs a program's nodes: kernels in order, collectives at once, waiting where the program waits."""
    import torch
    import torch.distributed as dist

    from stepsight.dataset.harness.ops.callables import op_call

    calls = {work: op_call(work.kind, list(work.dims), pool) for work in program.works if isinstance(work, Op)}
    _gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    numel = max((each.num_bytes // 4 for each in program.works if not isinstance(each, Op)), default=1)
    whole, part = torch.zeros(numel), torch.zeros(numel)
    waits: dict[int, list[int]] = {}
    for before, after, _why in program.edges:
        if not isinstance(program.nodes[before].work, Op):
            waits.setdefault(after, []).append(before)

    def issue(number: int) -> Any:
        node, tag = program.nodes[number], int(program.columns["seq"][number])
        buffer = whole[: node.work.num_bytes // 4]
        if node.work.kind == "send_recv":
            arrives = node.stream.endswith(f"to {rank}")
            return dist.irecv(buffer, 1 - rank, tag=tag) if arrives else dist.isend(buffer, 1 - rank, tag=tag)
        if node.work.kind == "all_gather":
            return _gather(buffer, part[: len(buffer) // RANKS], async_op=True)
        return dist.all_reduce(buffer, async_op=True)

    def run() -> None:
        running: dict[int, Any] = {}
        for number, node in enumerate(program.nodes):
            for before in waits.get(number, ()):
                if before in running:
                    running.pop(before).wait()
            if isinstance(node.work, Op):
                call = calls[node.work]
                call.run(*call.inputs())
            else:
                running[number] = issue(number)
        for work in running.values():
            work.wait()

    return run


def _worker(rank: int, folder: str, programs: Sequence[Sequence[Program]]) -> None:
    """Measure all programs in turn, several times; rank 0 writes the seconds of the slower rank."""
    import torch
    import torch.distributed as dist

    from stepsight.dataset.harness.ops.input_pool import Pool

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    pool = Pool(torch.device("cpu"), "fp32")
    steps = [_step(ranks[min(rank, len(ranks) - 1)], rank, pool) for ranks in programs]
    seconds = torch.zeros(ROUNDS, len(steps))
    for turn in range(ROUNDS):
        for place, step in enumerate(steps):
            dist.barrier()
            started = time.perf_counter()
            step()
            seconds[turn, place] = time.perf_counter() - started
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(seconds, f"{folder}/seconds.pt")
    dist.destroy_process_group()


def measured_rows(predictor: Predictor) -> list[Row]:
    """Predicted and measured milliseconds of training steps of each model in each way on two ranks."""
    import torch
    import torch.multiprocessing as mp

    rows: list[Row] = []
    programs = []
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in cases("distir")["models"].items():
            path = Path(folder) / name
            write_model(path, sizes)
            program = TensorProgram.load(path, training=True)
            for way, transform in WAYS.items():
                captured = transform(program).captured(RANKS, name)
                programs.append(captured.graphs)
                found = predict_captured(captured, "", predictor=predictor)
                rows.append({"model": name, "way": way, "predicted_ms": 1e3 * found.iteration_time_s})
        mp.spawn(_worker, (folder, programs), nprocs=RANKS)  # type: ignore[attr-defined,no-untyped-call]
        for row, seconds in zip(rows, torch.load(f"{folder}/seconds.pt").T.tolist(), strict=True):
            row["measured_ms"] = 1e3 * min(seconds)  # what else runs on the machine only adds
    return rows


def run(options: argparse.Namespace) -> tuple[Row, str]:
    """The grid of GPT-2, and with ``--measure`` the measured programs of two ranks."""
    if options.measure:
        rows = measured_rows(Predictor.load(options.measure))
        told, took = (np.array([row[name] for row in rows]) for name in ("predicted_ms", "measured_ms"))
        figures: Row = {"spearman": float(spearman(told, took)), "programs": rows}
        return figures, f"{table_of(rows, {name: name for name in rows[0]})}\n{figures_text(figures)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.pt2"
        write_model(path, cases("distir")["sizes"])
        started = time.perf_counter()
        grid = model_grid(TensorProgram.load(path, precision="bf16"), options.hardware, options.devices)
        seconds = time.perf_counter() - started
    facts: Row = {"placements": [asdict(each) for each in grid.placements], "seconds": seconds}
    facts |= {"best": asdict(grid.best), "pure": {name: asdict(each) for name, each in grid.pure.items()}}
    return facts, f"{grid}\n{len(grid.placements)} placements in {seconds:.1f} s"


OPTIONS: Options = {
    "--hardware": {"default": "a100-sxm-80gb"},
    "--devices": {"type": int, "default": 16},
    "--measure": {"type": Path, "metavar": "PREDICTOR", "help": "a predictor for this CPU: measure instead"},
}
STUDY = Study("distir", __doc__ or "", run, OPTIONS)
