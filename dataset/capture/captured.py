"""A captured script: graphs of some of its ranks, from records of their processes, saved in a folder and read back."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.bounded import parsing, read_numbers, read_parquet
from stepsight.dataset.base.errors import CaptureError, StepsightError
from stepsight.dataset.base.files import new_folder, read_json, write_json
from stepsight.dataset.graph.columns import EDGE_COLUMNS, HOST, NODE_COLUMNS, PHASES, WHY_NUMBER, Dependency
from stepsight.dataset.graph.graph_files import write_columns, write_graph
from stepsight.dataset.graph.program import COLLECTIVE, OP, Program
from stepsight.dataset.kinds import OP_KINDS
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.kinds.op_kinds import count
from stepsight.dataset.traces.classify import DTYPES, Scope, call_table, intern_op

FORM = 1  # of the folder
MANIFEST = "capture.json"


@dataclass(frozen=True, eq=False)
class Captured:
    """One training step of a script, on some of its ranks."""

    script: str  # its file name and arguments, for people
    world_size: int  # ranks of the job
    local_size: int  # ranks of a node
    torch: str  # version of PyTorch
    ranks: tuple[CapturedRank, ...]  # the captured ones, by number
    chosen: Mapping[int, str] = field(default_factory=dict)  # which have the largest part of an exchange, and of what

    @classmethod
    def of_program(cls, program: Program) -> Captured:
        """One rank's program, whose memory is not known; of a trace its first step that no observer slowed."""
        steps = sorted({*program.columns["step"].tolist()} - {-1}, key=lambda step: (step in program.slowed, step))
        program = program.of_step(steps[0]) if steps else program
        near = [1, *(work.ranks_per_node for work in program.works if isinstance(work, Collective))]
        rank = CapturedRank(program, np.zeros(len(program), dtype=np.int64))
        return cls(program.label, max(program.world_size, *near), max(near), "", (rank,))

    @property
    def graphs(self) -> tuple[Program, ...]:
        """Of the captured ranks."""
        return tuple(each.graph for each in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Counts of ops, FLOP and collectives of each rank: what ``stepsight capture --json`` prints."""
        of = {"script": self.script, "world_size": self.world_size, "devices_per_node": self.local_size}
        of |= {"torch": self.torch, "largest_parts": {str(rank): text for rank, text in self.chosen.items()}}
        return {**of, "ranks": [rank_summary(each) for each in self.ranks]}


def rank_summary(captured: CapturedRank) -> dict[str, Any]:
    """Counts of ops, FLOP and collectives of one rank."""
    graph, columns = captured.graph, captured.graph.columns
    is_op = columns["kind"] == OP
    kinds = Counter(graph.works[work].kind for work in columns["work"][is_op].tolist())
    phases = {name: int((columns["phase"][is_op] == number).sum()) for number, name in enumerate(PHASES)}
    ops = {"ops": kinds.total(), "ops_by_kind": dict(kinds.most_common()), "ops_by_phase": phases}
    return {
        **{"rank": graph.rank, **ops, "unknown_ops": int((columns["known"][is_op] == 0).sum())},
        **{"flops": compute_flops(graph), "collectives": collective_counts(graph), "streams": list(graph.streams)},
        **{"host_waits": int((columns["kind"] == HOST).sum()), "dependencies": dict(graph.dependency_counts())},
        **{"peak_bytes": captured.peak_bytes, "warnings": list(graph.warnings)},
    }


def warnings_once(texts: Iterable[str]) -> list[str]:
    """Warnings of all ranks, each once: those that differ in the line of the script alone become one with all lines."""
    found, told = dict[str, dict[str, None]](), []
    for text in texts:
        place, _, rest = text.partition(" ")
        of_line = re.fullmatch(r".+:\d+", place)
        found.setdefault(rest if of_line else text, {})[place if of_line else ""] = None
    for text, (first, *others) in found.items():
        also = f" (also {', '.join(others[:8])}{' ...' if len(others) > 8 else ''})" if others else ""
        told.append(f"{first} {text}{also}".strip())
    return told


def compute_flops(graph: Program) -> float:
    """FLOP of matrix products, convolutions and attention, as ``iteration_flops`` counts them for a job."""
    counts = np.bincount(graph.columns["work"][graph.columns["work"] >= 0], minlength=len(graph.works)).tolist()
    works = zip(counts, graph.works, strict=True)
    return float(sum(n * each.flops for n, each in works if isinstance(each, Op) and each.record.bound == "compute"))


def collective_counts(graph: Program) -> list[dict[str, Any]]:
    """Count and bytes of collectives by kind, group size and bytes of one."""
    chosen = graph.columns["kind"] == COLLECTIVE
    pairs = zip(*(graph.columns[name][chosen].tolist() for name in ("work", "group")), strict=True)
    found = Counter((graph.works[work], graph.groups[group][0] if group >= 0 else "") for work, group in pairs)
    sizes = ("group_size", "ranks_per_node", "num_bytes")
    rows: list[dict[str, Any]] = [
        {"kind": work.kind, "group": group, **{name: getattr(work, name) for name in sizes}, "count": count}
        for (work, group), count in found.items()
    ]
    return sorted(rows, key=lambda row: (row["kind"], row["group_size"], -row["num_bytes"]))


def write_captured(captured: Captured, folder: Path) -> None:
    """Write ``capture.json``, and each rank's graph and memory; refuses a folder that holds something else."""
    check_capture_folder(folder)
    with new_folder(folder) as part:
        for each in captured.ranks:
            write_graph(each.graph, part, f"rank{each.rank}")
            write_columns({"live_bytes": each.live_bytes}, part / f"rank{each.rank}.memory.parquet")
            write_json(part / f"rank{each.rank}.calls.json", list(each.calls))
        ranks = [each.rank for each in captured.ranks]
        write_json(part / MANIFEST, {"form": FORM, **captured.to_dict(), "ranks": ranks})


def is_program(path: Path) -> bool:
    """Whether a path names a program that ``Program.save`` wrote, with or without ``.json``."""
    return (path.parent / f"{path.name.removesuffix('.json')}.nodes.parquet").is_file()


def check_capture_folder(folder: Path) -> None:
    """Raise ``CaptureError`` if a folder holds something else than an earlier capture."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file())):
        raise CaptureError(f"--out must be a new or empty folder, or that of an earlier capture, got {folder}")


def captures_in(folder: Path) -> list[Path]:
    """Folders of the captures of several world sizes, the smallest first; empty if it holds none."""
    return sorted((each.parent for each in folder.glob(f"[0-9]*/{MANIFEST}")), key=lambda each: (len(each.name), each))


def read_captured(folder: Path) -> Captured:
    """Read what ``write_captured`` wrote, or one rank (``folder/rank0``); raises ``CaptureError`` if it is not that."""
    folder = Path(folder)
    if is_program(folder):
        return Captured.of_program(Program.load(folder))
    if sizes := captures_in(folder):
        raise CaptureError(f"{folder} holds captures of several world sizes: name one of {', '.join(map(str, sizes))}")
    with parsing(f"{folder} must be what `stepsight capture` or `stepsight job --program` wrote", CaptureError):
        tree = read_json(folder / MANIFEST)
        if tree["form"] != FORM:
            raise ValueError(f"form must be {FORM}, got {tree['form']!r:.40}")
        world_size, local_size = int(tree["world_size"]), int(tree["devices_per_node"])
        if not 1 <= local_size <= 2**16 or not 1 <= world_size <= 2**24:
            raise ValueError(f"world_size and devices_per_node must be sizes, got {world_size} and {local_size}")
        if not tree["ranks"]:
            raise ValueError("it must hold at least one rank, got none")
        ranks = tuple(_read_rank(folder, int(rank), world_size) for rank in tree["ranks"])
        return Captured(str(tree["script"]), world_size, local_size, str(tree["torch"]), ranks)


def _read_rank(folder: Path, rank: int, world_size: int) -> CapturedRank:
    graph = Program.load(folder / f"rank{rank}")
    live = read_numbers(read_parquet(folder / f"rank{rank}.memory.parquet"), "live_bytes", np.int64)
    path = folder / f"rank{rank}.calls.json"
    calls = tuple(read_json(path)) if path.is_file() else ()
    if len(live) != len(graph) or live.min(initial=0) < 0:
        raise StepsightError(f"live_bytes must be >= 0 for each of {len(graph)} nodes of rank {rank}")
    if graph.rank != rank or graph.world_size != world_size:
        got = f"got rank {graph.rank} of {graph.world_size}"
        raise StepsightError(f"rank {rank} of {world_size} must be in its own files, {got}")
    if calls and graph.columns["call"].max(initial=-1) >= len(calls):
        raise StepsightError(f"call of nodes must be below {len(calls)} in rank {rank}")
    return CapturedRank(graph, live, calls)


COMPOSITE = "stepsight::op"  # prefix of the signature of an op that the harness annotates
_KIND, _WORK, _STREAM, _PHASE, _NAME, _EVALUATION, _SEQUENCE, _NUMBER = range(8)


@dataclass(frozen=True, eq=False)
class CapturedRank:
    """One captured rank."""

    graph: Program  # what it does in a step; durations are not known and 0
    live_bytes: NDArray[np.int64]  # memory of all tensors when each node is issued, shape (n,)
    # distinct calls, each with its arguments as harness.capturing.recorder writes them; call of a node is an index of
    # it.  Empty for a capture of an earlier version.
    calls: tuple[Any, ...] = ()

    @property
    def rank(self) -> int:
        return self.graph.rank

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors in the step."""
        return int(self.live_bytes.max(initial=0))


def graph_of_record(record: dict[str, Any], local_size: int) -> CapturedRank:
    """Classify the calls that a process recorded, and connect its nodes by their dependencies."""
    works, (work, known, group, place) = _works(record, local_size)
    _, first = np.unique(place, return_index=True)  # the first part of each node
    rows = np.array(record["nodes"], dtype=np.int64).reshape(-1, 8)[first]
    columns = {name: np.zeros(len(first), dtype=np.int64) for name in NODE_COLUMNS}
    given = {"kind": _KIND, "stream": _STREAM, "phase": _PHASE, "name": _NAME, "seq": _NUMBER}
    columns |= {name: rows[:, at] for name, at in given.items()}
    columns |= {"work": work[first], "known": known[first], "group": group[first]}
    columns["call"] = np.where(rows[:, _KIND] == OP, rows[:, _WORK], -1)
    why = [(source, target, WHY_NUMBER[Dependency(each)]) for source, target, each in record["edges"]]
    told = np.array(why, dtype=np.int64).reshape(-1, 3)
    found = [np.column_stack([place[told[:, :2]], told[:, 2]])]
    for stream in range(len(record["streams"])):
        nodes = np.flatnonzero((columns["stream"] == stream) & (columns["kind"] != HOST))
        order = np.full_like(nodes[1:], WHY_NUMBER[Dependency.STREAM_ORDER])
        found.append(np.column_stack([nodes[:-1], nodes[1:], order]))
    edges = np.concatenate(found)
    edges = edges[edges[:, 0] < edges[:, 1]]
    _, once = np.unique(edges[:, :2], axis=0, return_index=True)  # each pair once
    edges = edges[np.sort(once)]
    graph = Program.of_columns(
        rank=record["rank"], world_size=record["world_size"], device=record.get("device", "cuda"),
        device_name="", columns=columns, edge_columns=dict(zip(EDGE_COLUMNS, edges.T, strict=True)),
        streams=tuple(record["streams"]), names=tuple(record["names"]), works=tuple(works),
        groups=tuple((name, tuple(ranks)) for name, ranks in record["groups"]), steps_s=np.zeros((1, 2)),
        warnings=tuple(record["notes"]), events=len(record["nodes"]),
    )  # fmt: skip
    live_bytes = np.array(record["live_bytes"], dtype=np.int64)[first]
    return CapturedRank(graph, live_bytes, tuple(record["works"]))


def _works(record: dict[str, Any], local_size: int) -> tuple[dict[Op | Collective, int], NDArray[np.int64]]:
    """Distinct works of a record, numbered, and columns of its nodes.

    They are each node's work, whether that is known, its group, and the node of the graph that it is (a part of); what
    is no work is a part of what came before it on its stream.
    """
    works: dict[Op | Collective, int] = {}
    scopes, forward = dict[int, Scope](), dict[int, tuple[int, ...]]()
    plain: dict[int, tuple[Op | None, bool]] = {}
    newest: dict[int, tuple[int, int, int]] = {}  # by stream: place, work, signature
    found, places = list[tuple[int, bool, int, int]](), 0

    def op_of(row: list[int], signature: Any) -> tuple[Op | None, bool]:
        evaluation, sequence = row[_EVALUATION], row[_SEQUENCE]
        if signature[0] == COMPOSITE:
            return intern_op(signature[1], tuple(signature[2]), signature[3]), all(signature[4:])
        if evaluation >= 0:
            if evaluation not in scopes:
                scopes[evaluation] = Scope("backward", forward.get(sequence, ()))
            return op_of_call(signature, scopes[evaluation])
        if row[_WORK] not in plain:
            plain[row[_WORK]] = op_of_call(signature, Scope())
        op, known = plain[row[_WORK]]
        if op is not None and op.kind == "linear":
            forward[sequence] = op.dims
        return op, known

    for row in record["nodes"]:
        kind, number, stream = row[:3]
        work: Op | Collective | None = None
        known, group = True, -1
        if kind == OP:
            op, known = op_of(row, record["works"][number])
            before = newest.get(stream, (-1, -1, -1))
            in_parts = op is not None and op.record.in_parts and number != before[2]
            if before[0] >= 0 and (op is None or (in_parts and works.get(op) == before[1])):
                found.append((-1, True, -1, before[0]))
                continue
            work = op or intern_op("fill", (1,), "fp32")
        elif kind == COLLECTIVE:
            _, name, num_bytes, group = record["works"][number]
            ranks = record["groups"][group][1]
            nodes = len({rank // local_size for rank in ranks})
            work = Collective(name, num_bytes, len(ranks), -(-len(ranks) // nodes))
        signature = -1 if work is None else works.setdefault(work, len(works))
        found.append((signature, known, group, places))
        newest[stream] = places, signature, number
        places += 1
    return works, np.array(found, dtype=np.int64).reshape(-1, 4).T


_FILL_NAMES = "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full scalar_tensor eye"
_FILLS = frozenset(f"aten::{name}" for name in _FILL_NAMES.split())
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::clone")
_LISTS = ("aten::_foreach_copy_", "aten::_chunk_cat", "fsdp::chunk_cat")  # whose first and last tensors tell types
_NARROW = {"bf16", "fp16"}


def op_of_call(signature: Sequence[Any], scope: Scope) -> tuple[Op | None, bool]:
    """The op of a call, None if it moves at most one element or is no work; and whether its kind is known.

    ``signature``: name, dims, types, strides, literals, and dims, type and number of the outputs (see
    ``harness.capturing.recorder``).  ``scope``: the autograd evaluation around it.
    """
    name, dims, types, strides, literals, made = signature
    args = {"Input Dims": dims, "Input type": types, "Input Strides": strides, "Concrete Inputs": literals}
    read = [kind.removeprefix("TensorList ") for kind in types if kind != "Scalar"]
    out_numel, out_type = (math.prod(made[0]), made[1]) if made else (0, "float")
    dtype, weight = DTYPES[read[0] if read else out_type]
    if name in _FILLS:
        return _op("fill", (out_numel,), DTYPES[out_type]), True
    if name in _COPIES and read and made and (cast := _cast(read[-1], out_type)):
        return _op("cast", (out_numel,), (cast, 1.0)), True
    if name in _LISTS and len(read) > 1 and (cast := _cast(read[0], read[-1])):
        return _op("cast", (count(dims[0]),), (cast, 1.0)), True
    known = call_table().get(name)
    found = None if known is None else known(args, scope)
    if known is not None and found is None:
        return None, True
    if found is None or len(found[1]) != len(OP_KINDS[found[0]].dim_names) or max(found[1]) <= 0:
        largest = max([*(count(shape) for shape in dims if shape), out_numel])
        return _op("elementwise", (largest,), (dtype, weight)), largest <= 1
    kind, sizes = found
    if len(sizes) == 1:
        sizes = (max(sizes[0], out_numel if made and made[2] == 1 else 0),)
    return _op(kind, tuple(sizes), (dtype, weight)), True


def _op(kind: str, dims: tuple[int, ...], typed: tuple[str, float]) -> Op | None:
    dtype, weight = typed
    if len(dims) == 1:
        dims = (int(dims[0] * weight),) if dims[0] > 1 else ()
    return intern_op(kind, dims, dtype) if dims else None


def _cast(source: str, target: str) -> str:
    """The 16-bit type of a conversion from or to fp32; empty for other conversions."""
    kinds = {DTYPES[source][0], DTYPES[target][0]}
    narrow = kinds & _NARROW
    return narrow.pop() if kinds - narrow == {"fp32"} and narrow else ""
