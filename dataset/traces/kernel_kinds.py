"""The op or collective of a kernel: from the call that launched it, else from its name, else an opaque op."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from stepsight.dataset.base.caching import cached
from stepsight.dataset.graph.columns import Flags
from stepsight.dataset.graph.rank_trace import Placement, Rendezvous
from stepsight.dataset.kinds import nccl_names
from stepsight.dataset.kinds.op import OP_KINDS, Collective, Op
from stepsight.dataset.kinds.op_kinds import count
from stepsight.dataset.traces import classify
from stepsight.dataset.traces.classify import NAMES, Scope, intern_op, parse_annotation
from stepsight.dataset.traces.event_blocks import parse
from stepsight.dataset.traces.event_columns import Annotation, RankEvents
from stepsight.dataset.traces.host_calls import CallTree, is_evaluation

_MOST_THREADS = 2**31
_ANNOTATED = "stepsight::op "  # operators of predicted traces

_PATTERNS = {
    table: tuple((re.compile(pattern, re.IGNORECASE), meaning) for pattern, meaning in NAMES[table])
    for table in ("kernels", "number_types", "collectives")
}
_COPIES: Mapping[str, str] = NAMES["copies"]
_DIRECTIONS = (("DtoH", "to_host"), ("HtoD", "from_host"))  # words in names of copies, and their kinds


class Launch(NamedTuple):
    """How a kernel is launched."""

    name: str
    category: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int


def launches(events: RankEvents) -> list[Launch]:
    """Launch configuration of each distinct kernel."""
    found = []
    for category, name, config in events.kernels:
        *sizes, registers, shared = parse(config)
        whole = [isinstance(each, list) and all(isinstance(size, int) for size in each) for each in sizes]
        counts = [math.prod(each) if fine else 0 for fine, each in zip(whole, sizes, strict=True)]
        numbers = [each if isinstance(each, int | float) else 0 for each in (*counts, registers, shared)]
        found.append(Launch(name, category, *(min(max(int(each), 0), _MOST_THREADS) for each in numbers)))
    return found


class KernelKinds:
    """Finds the op of each kernel; calls that launch several kernels are classified once."""

    def __init__(self, events: RankEvents, tree: CallTree) -> None:
        self._events, self._tree, known = events, tree, classify.call_table()
        self._parent, self._names = tree.parent.tolist(), events.ops["name"].tolist()
        self._signature, self._sequence = events.ops["signature"].tolist(), events.ops["sequence"].tolist()
        self._dtype = "fp32"  # of the newest op
        self._is_known = [name in known or name.startswith(_ANNOTATED) for name in events.names]
        self._is_evaluation = [is_evaluation(name) for name in events.names]
        self._calls: dict[int, tuple[int, Op | None]] = {}
        self._scopes: dict[int, Scope] = {}
        self._forward_dims: dict[int, tuple[int, ...]] = {}
        self._by_signature: dict[int, Op | None] = {}  # of calls that are the same in every scope

    def find(self, launch: Launch, owner: int, num_bytes: int) -> tuple[Op, int, bool]:
        """Op of a kernel, the call that it belongs to (-1: unknown) and whether its kind is known.

        ``owner``: innermost op around the launch, -1: unknown; ``num_bytes``: that a copy moves, -1: unknown.
        """
        call, op = self._of_call(owner) if owner >= 0 else (-1, None)
        if launch.category in _COPIES:
            kind = next((to for word, to in _DIRECTIONS if word in launch.name), _COPIES[launch.category])
            if op is None or not op.kind == kind == "copy":
                return intern_op(kind, (max(num_bytes, 0) // 4,), "fp32"), call, True
        if op is not None and not launch.name.startswith("triton_"):
            return op, call, True
        named = _op_named(launch.name)
        if named is not None and len(named.dims) == 1:  # one element per thread is the best guess
            named = intern_op(named.kind, (launch.blocks * launch.threads,), named.dtype)
        if named is not None:
            if op is None and owner >= 0 and named.kind == "elementwise":
                named = classify.classify_unknown(self._events.arguments(self._signature[owner])) or named
            return named, call, True
        dims = (launch.blocks, launch.threads, launch.registers, launch.shared_bytes)
        return intern_op("opaque", dims, _dtype(launch.name)), call, False

    def _of_call(self, owner: int) -> tuple[int, Op | None]:
        """The outermost known call around a launch and its op; without one, the outermost call of a name space."""
        if owner not in self._calls:
            known, at, outer = -1, owner, owner
            while at >= 0 and not self._is_evaluation[self._names[at]]:
                if self._is_known[self._names[at]]:
                    known = at
                outer, at = at, self._parent[at]
            self._calls[owner] = (known, self.classified(known)) if known >= 0 else (outer, None)
        return self._calls[owner]

    def classified(self, call: int) -> Op | None:
        """The op that a known call is; must be called in the order of calls."""
        tree, number, op = self._tree, self._signature[call], None
        evaluation, sequence = int(tree.backward[call]), int(tree.sequence[call])
        if evaluation >= 0 and self._sequence[call] not in (-1, self._sequence[evaluation]):
            evaluation = -1  # backward computes a part of forward again
        name = self._events.names[self._names[call]]
        if number in self._by_signature:
            op = self._by_signature[number]
        elif name.startswith(_ANNOTATED):
            with suppress(KeyError, ValueError):  # the name may be wrong
                op = classify.annotated_op(parse_annotation(name))
        else:  # in the scope of the node of autograd's graph that is evaluated, or of none in forward
            if evaluation >= 0 and evaluation not in self._scopes:
                node = self._events.names[self._names[evaluation]].split(": ")[-1]
                self._scopes[evaluation] = Scope(node, self._forward_dims.get(sequence, ()))
            scope = self._scopes[evaluation] if evaluation >= 0 else Scope()
            op = classify.classify(name, self._events.arguments(number), scope, self._dtype)
        if not classify.depends_on_scope(name):
            self._by_signature[number] = op
        if op is not None and op.kind == "linear" and sequence >= 0 and evaluation < 0:
            self._forward_dims[sequence] = op.dims
        self._dtype = op.dtype if op is not None else self._dtype
        return op


def named_kind(name: str) -> str | None:
    """Kind of ops in the name of a kernel or call, None if there is none."""
    return _meaning("kernels", name)


@cached(16384)
def _op_named(name: str) -> Op | None:
    """The op in the name of a kernel, without its sizes; None if there is none."""
    kind = named_kind(name)
    return intern_op(kind, (0,) * len(OP_KINDS[kind].dim_names), _dtype(name)) if kind else None


def _meaning(table: str, name: str) -> str | None:
    return next((meaning for pattern, meaning in _PATTERNS[table] if pattern.search(name)), None)


def _dtype(name: str) -> str:
    return _meaning("number_types", name) or "fp32"


_LIBRARIES = re.compile(NAMES["libraries"], re.IGNORECASE)
_OURS = "stepsight::collective"
_MOST_DEPTH = 8  # enclosing calls of a launch that are examined


def is_collective(name: str) -> bool:
    """Whether a kernel belongs to a communication library."""
    return bool(_LIBRARIES.match(name[:40]))


class CollectiveNodes:
    """Finds the collectives of one rank."""

    def __init__(self, events: RankEvents, world_size: int, placement: Placement) -> None:
        self._events, self._world_size, self._placement = events, world_size, placement
        self._numbers: dict[str, int] = {}
        self._calls: dict[int, list[Annotation]] = {}  # by thread, in order of start
        named = [each for each in events.annotations if each.name.startswith(("nccl:", "rccl:", _OURS))]
        for call in sorted([*named, *events.comms], key=lambda each: each.start):
            self._calls.setdefault(call.thread, []).append(call)

    def find(self, row: int, launch: Launch, issued: float, thread: int) -> tuple[Op | Collective, Rendezvous | None]:
        """The collective of a device event, an op if it joins no ranks; must be called in the order of launches."""
        said = self._said(issued, thread) | self._events.collective_args.get(row, {})
        ranks = _ranks(said)
        size = int(said.get("Group size", 0)) or len(ranks) or self._world_size
        kind, num_bytes = _kind_and_bytes(said, size)
        named = bool(kind)
        if size < 2:
            return intern_op("copy", (0,), "fp32"), None
        if not named:
            kind = _meaning("collectives", launch.name) or "all_reduce"
        ranks = ranks if named and len(ranks) == size else ()
        names = (said.get(key) for key in ("group", "Process Group Description", "Process Group Name") if named)
        group = self._placement.axis(ranks) or str(next(filter(None, names), "nccl")).removeprefix("mesh_")
        number = self._numbers[group] = self._numbers.get(group, -1) + 1
        if named and isinstance(told := said.get("Seq"), int) and told >= 0:
            number = told
        work = Collective(kind, num_bytes, size, self._placement.ranks_per_node(ranks, size))
        return work, Rendezvous(group, number, ranks)

    def _said(self, issued: float, thread: int) -> dict[str, Any]:
        """The communication calls around a launch; a record has more information than an annotation."""
        calls, said = self._calls.get(thread, []), dict[str, Any]()
        place = bisect_right(calls, issued, key=lambda call: call.start)
        for call in calls[max(place - _MOST_DEPTH, 0) : place]:
            if call.end < issued:
                continue
            if call.name.startswith(("nccl:", "rccl:")):
                shapes, types = call.args.get("Input Dims") or [[]], call.args.get("Input type") or [""]
                said = {"Collective name": call.name[5:], "shape": shapes[0], "type": types[0], **said}
            elif "Collective name" in call.args:
                said = {**said, **call.args}
            elif call.name.startswith(_OURS):
                said = {**parse_annotation(call.name), **said}
        return said


def _kind_and_bytes(said: dict[str, Any], size: int) -> tuple[str, int]:
    """Kind and bytes of a collective of some ranks, by our annotation, else by NCCL's record; "" if neither tells."""
    if "kind" in said:
        return str(said["kind"]), int(said["num_bytes"])
    kind, side = nccl_names().get(str(said.get("Collective name", "")), ("", ""))
    if not kind:
        return "", 0
    if f"{side} msg nelems" in said:
        num_bytes = int(said[f"{side} msg nelems"]) * classify.ELEMENT_BYTES.get(str(said.get("dtype", "")), 4)
    else:  # records of old: the shape of one side alone
        num_bytes = count(said.get("shape", [])) * classify.ELEMENT_BYTES.get(str(said.get("type")), 4)
    return kind, num_bytes * size if kind == "all_gather" and "Out msg nelems" not in said else num_bytes


def _ranks(said: dict[str, Any]) -> tuple[int, ...]:
    if "ranks" in said:
        return tuple(int(part) for part in str(said["ranks"]).split(","))
    with suppress(ValueError):  # it may be cut off with an ellipsis
        if found := json.loads(said.get("Process Group Ranks", "[]")):
            return tuple(int(rank) for rank in found)
    start, stride, size = (said.get(key, -1) for key in ("Global rank start", "Global rank stride", "Group size"))
    return tuple(range(start, start + stride * size, stride)) if start >= 0 and stride > 0 and size > 0 else ()


def mask_of(events: RankEvents) -> Flags:
    """``(d,)``: whether each device event is a collective."""
    named = np.array([is_collective(name) for _, name, _ in events.kernels], dtype=np.bool_)
    mask = named[events.device["kernel"]] if len(events.device) else np.zeros(0, dtype=np.bool_)
    mask[list(events.collective_args)] = True
    return mask
