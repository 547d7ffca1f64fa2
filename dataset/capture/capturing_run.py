"""``capture``: run a script as ranks of a fake world, one process each, and read their graphs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.base.files import preset, read_json
from stepsight.dataset.capture.captured import Captured, CapturedRank, graph_of_record
from stepsight.dataset.graph.program import COLLECTIVE
from stepsight.dataset.harness.running.workers import how_ended

MODULE = "stepsight.dataset.harness.capturing.running_script"
MOST_RANKS = 256  # limit of one capture
STACK_S = 5.0  # within which a process writes its stack on request
_FILES = ("request", "out", "stack", "log")  # by which a process is told what to do, and tells what it found
DEVICES = ("cuda", "cpu")
NO_OUTPUT = "none"  # for the last line that a script wrote

Progress = Callable[[int, int | str, str], None]
Ranks = tuple[int, ...]
Issued = tuple[str, str, int, str]  # group by torch's name, kind, bytes, line of the script
Largest = tuple[Ranks, str]  # ranks of a group with the largest part, and what they exchange


@dataclass(frozen=True)
class CaptureRequest:
    """The settings of a capture."""

    script: Path  # the user's script
    arguments: tuple[str, ...]  # its arguments
    world_size: int  # ranks of the job
    local_size: int = 8  # ranks of a node
    # which ranks; empty: rank 0, and its peers, on and on: one for each pipeline stage, and the first, the last and the
    # one with the largest part of the ranks that exchange rows with an all-to-all
    ranks: tuple[int, ...] = ()
    warm_up: int = 1  # training steps before the one that is captured
    device: str = "cuda"  # cuda, or cpu: the script finds no GPU, and its ops are those of the host
    timeout_s: float = 600.0  # most seconds for one rank

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise CaptureError(f"the script must be a Python file, got {str(self.script)!r:.200}")
        if self.device not in DEVICES:
            raise CaptureError(f"--device must be one of {', '.join(DEVICES)}, got {self.device!r:.80}")
        limits: list[tuple[str, float, float, float]] = [("--world-size", self.world_size, 1, 2**20)]
        limits += [("--devices-per-node", self.local_size, 1, 1024), ("--warm-up", self.warm_up, 1, 100)]
        limits += [("a rank", rank, 0, self.world_size - 1) for rank in self.ranks]
        for name, value, least, most in (*limits, ("--timeout", self.timeout_s, 1e-3, 1e7)):
            if not least <= value <= most:
                raise CaptureError(f"{name} must lie within {least:g} and {most:.10g}, got {value:g}")


def capture(request: CaptureRequest, on_rank: Progress | None = None) -> Captured:
    """Capture one training step; an error (``CaptureError``) names the script's own line."""
    waiting, done, version = list(request.ranks or (0,)), dict[int, CapturedRank](), ""
    boundaries = dict[int, Any]()  # by the rank that has the first stage
    issued = dict[int, dict[Ranks, list[Issued]]]()  # by rank
    largest = dict[Ranks, Largest]()
    while waiting:
        rank = waiting.pop(0)
        if rank in done:
            continue
        if on_rank is not None:
            on_rank(len(done), len(done) + 1 + len(waiting), f"rank {rank}")
        record = _run(request, rank, boundary=next(iter(boundaries.values()), None))
        if (first := record.get("needs_boundary_of")) is not None:
            boundaries[first] = _run(request, first, only_boundary=True)["boundary"]
            record = _run(request, rank, boundary=boundaries[first])
        if record["boundary"] is not None:
            boundaries.setdefault(rank, record["boundary"])
        done[rank], issued[rank] = graph_of_record(record, request.local_size), issued_by_group(record)
        version, largest = record["torch"], largest_parts(record) | largest
        if not request.ranks:
            found = peers(done[rank]) + [larger[-1] for larger, _ in largest.values() if not {*larger} & {*done}]
            waiting += [peer for peer in dict.fromkeys(found) if peer not in done and peer not in waiting]
        check_orders(issued)
        if len(done) + len(waiting) > MOST_RANKS:
            raise CaptureError(f"at most {MOST_RANKS} ranks can be captured at once: name some with --ranks 0,1,...")
    for group, (larger, told) in largest.items():
        if not {*larger} & {*done}:
            text = (
                f"rank {larger[-1]} {told} and is not captured: a step takes longer than predicted, and may need more "
            )
            text += f"memory; capture it too: --ranks {','.join(map(str, sorted({*done, larger[-1]})))}"
            place = min({*group} & {*done})
            graph = done[place].graph
            done[place] = replace(done[place], graph=graph.replace(warnings=(*graph.warnings, text)))
    script = " ".join([request.script.name, *request.arguments])
    ranks = tuple(done[rank] for rank in sorted(done))
    chosen = {larger[-1]: told for larger, told in largest.values() if told and larger[-1] in done}
    return Captured(script, request.world_size, request.local_size, version, ranks, chosen)


def peers(captured: CapturedRank) -> list[int]:
    """Ranks with different work: those that a rank exchanges messages with, and the last of each all-to-all's group.

    An all-to-all's ranks hold different experts; if these are not divided evenly, the last rank has fewest.
    """
    graph, found = captured.graph, dict[int, None]()
    chosen = graph.columns["kind"] == COLLECTIVE
    pairs = zip(*(graph.columns[name][chosen].tolist() for name in ("group", "work")), strict=True)
    for group, work in sorted(set(pairs)):
        ranks, kind = graph.groups[group][1], graph.works[work].kind
        found |= dict.fromkeys(ranks if kind == "send_recv" else ranks[-1:] if kind == "all_to_all" else ())
    return [rank for rank in found if rank != captured.rank]


def largest_parts(record: Mapping[str, Any]) -> dict[Ranks, Largest]:
    """The ranks of each group that exchange most with a record's rank; only this one if it is among them."""
    found, own = dict[Ranks, Largest](), record["rank"]
    for group, exchanged in record["exchanged"]:
        ranks, most = tuple(record["groups"][group][1]), max(exchanged)
        larger = tuple(rank for rank, part in zip(ranks, exchanged, strict=True) if part == most)
        usual = sorted(exchanged)[len(ranks) // 2]
        told = f"has the largest part of what {len(ranks)} ranks exchange: {most / 1e6:.4g} MB with rank {own}, "
        told += f"usual are {usual / 1e6:.4g} MB"
        found[ranks] = (own,) if own in larger else larger, told if most > usual else ""
    return found


def _run(request: CaptureRequest, rank: int, **more: Any) -> dict[str, Any]:
    """Run the script in a process of its own; return the record of one rank's step."""
    with ExitStack() as stack_of_files:  # without names: a process that is killed leaves none
        files = {name: stack_of_files.enter_context(tempfile.TemporaryFile()) for name in _FILES}
        paths = {name: Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for name, file in files.items()}
        asked = {
            "script": str(request.script.resolve()), "arguments": list(request.arguments), "rank": rank,
            "world_size": request.world_size, "local_size": request.local_size, "warm_up": request.warm_up,
            "device": request.device, "out": str(paths["out"]), "stack": str(paths["stack"]),
            "parent": os.getpid(), **more,
        }  # fmt: skip
        paths["request"].write_text(json.dumps(asked), "utf-8")
        how, last_line = _ended(request, rank, paths)
        if not paths["out"].stat().st_size:
            where = request.script.name + _own_line(paths["stack"], request.script)
            told = f"({how}); the last line that it wrote: {last_line}"
            raise CaptureError(f"{where}: the process of rank {rank} ended before its steps were through {told}")
        record: dict[str, Any] = read_json(paths["out"])
    if "error" in record:
        raise CaptureError(_explained(request, rank, record, last_line))
    return record


def _ended(request: CaptureRequest, rank: int, paths: Mapping[str, Path]) -> tuple[str, str]:
    """Run the process of a rank and its children to the end; return the exit status and the last line of output."""
    command = [sys.executable, "-P", "-m", MODULE, str(paths["request"])]
    with paths["log"].open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(request.timeout_s)
        except subprocess.TimeoutExpired:
            late = f"{request.timeout_s:g} s{_line_of_stack(process, request.script, paths['stack'])}"
            remedy = "capture a smaller step, or allow more with --timeout"
            raise CaptureError(f"rank {rank} did not finish its steps within {late}: {remedy}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = paths["log"].read_text("utf-8", "replace").strip().splitlines()
    return how_ended(code), (lines[-1][:300] if lines else NO_OUTPUT)


def _line_of_stack(process: subprocess.Popen[bytes], script: Path, stack: Path) -> str:
    """The line of the script that runs now: the process is asked to write its stack."""
    process.send_signal(signal.SIGUSR1)
    until = time.monotonic() + STACK_S
    while time.monotonic() < until and not stack.stat().st_size and process.poll() is None:
        time.sleep(0.05)
    line = _own_line(stack, script)
    return line and f" (it is at {script.name}{line})"


def _own_line(stack: Path, script: Path) -> str:
    """``:12``: the innermost line of the script in a stack that was written, "" if there is none."""
    rows = re.findall(r'File "(.*)", line (\d+)', stack.read_text("utf-8", "replace"))
    return next((f":{line}" for name, line in rows if Path(name).resolve() == script.resolve()), "")


def _explained(request: CaptureRequest, rank: int, record: dict[str, Any], said: str) -> str:
    """The error of a rank, with the script's line; ``said``: the last line of output."""
    notes = "".join(f"; {note}" for note in record["notes"][:2])
    where = record["line"] or request.script.name
    if record["error"] == "few steps":
        rule = f"must take at least {request.warm_up + 1} training steps (calls of an optimizer's step)"
        rule += f", got {record['steps']} on rank {rank}: let it run for more, or lower --warm-up{notes}"
        last = f"; the last line that it wrote: {said}" if said != NO_OUTPUT else ""
        return f"{request.script.name} {rule}{last}"
    if record["error"].startswith("SystemExit"):
        return f"{where}: the script ended itself ({record['error']}) on rank {rank}: {said}{notes}"
    told = record["error"] + record["trace"]
    hint = next((f" ({text})" for word, text in preset("capture_hints.toml").items() if word in told), "")
    error = record["error"].split("\n")[0]
    return f"{where}: {error}{hint} [rank {rank} of {request.world_size}, after {record['steps']} steps]{notes}"


def issued_by_group(record: Mapping[str, Any]) -> dict[Ranks, list[Issued]]:
    """Collectives of a record, without messages, by the participating ranks, in order."""
    found: dict[Ranks, list[Issued]] = {}
    for group, name, kind, num_bytes, line in record["issued"]:
        found.setdefault(tuple(record["groups"][group][1]), []).append((name, kind, num_bytes, line))
    return found


def check_orders(ranks: Mapping[int, Mapping[Ranks, Sequence[Issued]]]) -> None:
    """Raise ``CaptureError``, with the script's lines, if two ranks differ in what they issue together."""
    pairs = combinations(sorted(ranks), 2)
    for one, other, group in ((*pair, group) for pair in pairs for group in {*ranks[pair[0]], *ranks[pair[1]]}):
        sides = [ranks[rank].get(group, ()) if {one, other} <= {*group} else () for rank in (one, other)]
        named = len({frozenset(name for name, *_ in side) for side in sides}) == 1  # else ranks name groups differently

        def meeting(issued: Issued, named: bool = named) -> tuple[str, str, int]:
            """What ranks that wait for each other have in common: parts of an all-to-all differ in size."""
            name, kind, num_bytes, _ = issued
            return name if named else "", kind, 0 if kind == "all_to_all" else num_bytes

        for number, pair in enumerate(zip_longest(*sides), 1):
            if None in pair or meeting(pair[0]) != meeting(pair[1]):
                mine, theirs = (
                    "{1} of {2} bytes in group {0}".format(*each) + (each[3] and f" at {each[3]}") if each else "none"
                    for each in pair
                )
                rule = f"ranks {one} and {other} would wait for each other forever: as number {number} of their"
                raise CaptureError(f"{rule} collectives rank {one} issues {mine}, and rank {other} {theirs}")
