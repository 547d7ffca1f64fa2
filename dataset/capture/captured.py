"""A captured script: the graphs of some of its ranks, saved in a folder and read back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepsight.dataset.base.bounded import read_numbers, read_parquet
from stepsight.dataset.base.errors import CaptureError, StepsightError
from stepsight.dataset.base.files import new_folder, read_json, write_json
from stepsight.dataset.capture.record_graph import CapturedRank
from stepsight.dataset.graph.graph_files import write_columns, write_graph
from stepsight.dataset.graph.program import COLLECTIVE, HOST, OP, PHASES, Program
from stepsight.dataset.kinds.op import Op

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

    @property
    def graphs(self) -> tuple[Program, ...]:
        """Of the captured ranks."""
        return tuple(each.graph for each in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Counts of ops, FLOP and collectives of each rank: what ``stepsight capture --json`` prints."""
        of = {"script": self.script, "world_size": self.world_size, "devices_per_node": self.local_size}
        return {**of, "torch": self.torch, "ranks": [rank_summary(each) for each in self.ranks]}


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


def check_capture_folder(folder: Path) -> None:
    """Raise ``CaptureError`` if a folder holds something else than an earlier capture."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file())):
        raise CaptureError(f"--out must be a new or empty folder, or that of an earlier capture, got {folder}")


def captures_in(folder: Path) -> list[Path]:
    """Folders of the captures of several world sizes, the smallest first; empty if it holds none."""
    return sorted((each.parent for each in folder.glob(f"[0-9]*/{MANIFEST}")), key=lambda each: (len(each.name), each))


def read_captured(folder: Path) -> Captured:
    """Read what ``write_captured`` wrote; raises ``CaptureError`` if it is not that."""
    folder = Path(folder)
    if sizes := captures_in(folder):
        raise CaptureError(f"{folder} holds captures of several world sizes: name one of {', '.join(map(str, sizes))}")
    try:
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
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CaptureError(f"{folder} must be a folder that `stepsight capture` wrote: {why}") from None


def _read_rank(folder: Path, rank: int, world_size: int) -> CapturedRank:
    graph = Program.load(folder / f"rank{rank}")
    live = read_numbers(read_parquet(folder / f"rank{rank}.memory.parquet"), "live_bytes", np.int64)
    path = folder / f"rank{rank}.calls.json"
    calls = tuple(read_json(path)) if path.is_file() else ()
    if len(live) != len(graph) or live.min(initial=0) < 0:
        raise StepsightError(f"live_bytes must be >= 0 for each of {len(graph)} nodes of rank {rank}")
    if graph.rank != rank or graph.world_size != world_size:
        raise StepsightError(
            f"rank {rank} of {world_size} must be in its own files, got rank {graph.rank} of {graph.world_size}"
        )
    if calls and graph.columns["call"].max(initial=-1) >= len(calls):
        raise StepsightError(f"call of nodes must be below {len(calls)} in rank {rank}")
    return CapturedRank(graph, live, calls)
