"""Ops and communication calls of a host that computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepsight.dataset.graph.columns import Flags, Floats
from stepsight.dataset.graph.rank_trace import Rendezvous
from stepsight.dataset.kinds import c10d_calls
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.kinds.op_kinds import count
from stepsight.dataset.traces import classify
from stepsight.dataset.traces.classify import NAMES, annotated_op, parse_annotation
from stepsight.dataset.traces.event_columns import Annotation, RankEvents
from stepsight.dataset.traces.host_calls import call_tree
from stepsight.dataset.traces.kernel_kinds import KernelKinds

_WEIGHTLESS = frozenset([f"aten::{word}" for word in NAMES["weightless"].split()] + NAMES["weightless_others"].split())
_WRAPPERS = frozenset(f"aten::{word}" for word in NAMES["wrappers"].split())
# Runtime calls that put something on a device; all others are the host's own.
_LAUNCHES = ("Launch", "Memcpy", "Memset", "EventRecord", "WaitEvent")
_BOOKKEEPING = ("autograd::", "torch::", "c10d::", "profiler::", "gloo:", "nccl:", "torch.distributed", "record_param")
_OP, _COLLECTIVE = "stepsight::op ", "stepsight::collective "  # our annotations of calls
_NOWHERE, _COMMUNICATION = -1, -2  # where a call lies, unless within a work


@dataclass(slots=True)
class Work:
    """One op or collective while it is being read; microseconds."""

    work: Op | Collective  # signature
    name: str  # call it comes from
    issue: float  # when the host came to it
    start: float  # when it began
    end: float  # when it ended
    own: float  # time within it that is its own
    stream: Any  # host thread or group
    known: bool = True  # false for a call of no known kind
    meets: Rendezvous | None = None  # of a collective
    recorded: int = 1  # calls that a profiler recorded within it, itself included


class HostWorks:
    """Ops of a host that computes, by start, and what its annotations tell of communication; microseconds.

    ``main`` is the thread of the segments, or that with the most calls; ``top`` are outermost calls of it, from start
    to end.  Raises ``ValueError`` if one of our own annotations is malformed.
    """

    def __init__(self, events: RankEvents) -> None:
        self.calls: list[Annotation] = []  # our annotations of collectives, and c10d calls that none encloses
        self.waits: list[Annotation] = []  # our annotations of waits
        self.workers: list[tuple[str, float, float]] = []  # kind, start and end of gloo's spans
        weighty, threads = ~_weightless(events), events.ops["thread"]
        self.main = int(np.bincount(threads[weighty]).argmax()) if weighty.any() else 0
        for name in {each.name for each in events.annotations if each.name.startswith(_OP)}:
            annotated_op(parse_annotation(name))
        workers = self._read_annotations(events.annotations)
        ops = self._read_ops(events.with_calls((_OP, _COLLECTIVE)))
        names = {self.main: "compute"}
        self.ops = [work for work in ops if work.stream == self.main or work.stream not in workers]
        for work in self.ops:  # what gloo's workers copy is part of their collectives
            work.stream = names.setdefault(work.stream, f"host{len(names)}")
        own, comms = weighty & (threads == self.main), [each for each in events.comms if each.thread == self.main]
        start = np.concatenate([events.ops.start[own], [each.start for each in comms]])
        end = np.concatenate([events.ops.end[own], [each.end for each in comms]])
        order = np.lexsort((-end, start))
        reached = np.maximum.accumulate(np.append(-1.0, end[order]))[:-1]
        self.top = [(start[row], end[row]) for row in order[start[order] >= reached].tolist()]

    def _read_annotations(self, marks: list[Annotation]) -> set[int]:
        """Add what our annotations and gloo's tell; return the threads of gloo's workers."""
        workers: set[int] = set()
        newest: dict[int, Annotation] = {}  # by thread
        for mark in marks:
            word, values = mark.name.split(" ", 1)[0].removeprefix("stepsight::"), parse_annotation(mark.name)
            if mark.name.startswith("gloo:"):
                self.workers.append((mark.name[5:], mark.start, mark.end))
                workers.add(mark.thread)
            elif not mark.name.startswith("stepsight::"):
                continue
            elif word == "segment":
                self.main = mark.thread
            elif word == "collective":
                newest[mark.thread] = replace(mark, args=dict(values))
                self.calls.append(newest[mark.thread])
            elif word == "modelled" and mark.thread in newest and mark.start < newest[mark.thread].end:
                newest[mark.thread].args.update(values)
            elif word == "wait":
                self.waits.append(replace(mark, args=dict(values)))
        return workers

    def _read_ops(self, events: RankEvents) -> list[Work]:
        """Outermost calls of known kinds, and of no known kind if none of a known one is within; add c10d calls."""
        tree, known, communication = call_tree(events), classify.call_table(), c10d_calls()
        kinds, signatures = KernelKinds(events, tree), events.ops["signature"].tolist()
        works: dict[int, Work] = {}
        around, maybe = [_NOWHERE] * len(events.ops), [_NOWHERE] * len(events.ops)
        columns = (tree.parent, events.ops["name"], events.ops["thread"], events.ops.start, events.ops.end)
        for row, (up, number, thread, start, end) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            name = events.names[number]
            around[row], maybe[row] = (around[up], maybe[up]) if up >= 0 else (_NOWHERE, _NOWHERE)
            if around[row] == _COMMUNICATION or name in _WEIGHTLESS:
                continue
            if around[row] >= 0:
                works[around[row]].recorded += not name.startswith((_OP, _COLLECTIVE))
            elif name in known or name.startswith(_OP):
                op = kinds.classified(row)
                if op is not None:
                    works.pop(maybe[row], None)
                    told = f"stepsight::{op.kind}" if name.startswith(_OP) else name
                    works[row] = Work(op, told, start, start, end, end - start, thread)
                    around[row] = row
            elif name in communication or name.startswith(_COLLECTIVE):
                around[row] = _COMMUNICATION
                if name in communication:
                    (kind, index), args = communication[name], events.arguments(signatures[row])
                    shape, dtype = (
                        dict(enumerate(args.get(key) or [])).get(index) for key in ("Input Dims", "Input type")
                    )
                    num_bytes = count(shape or []) * classify.ELEMENT_BYTES.get(dtype or "", 4)
                    said = {"kind": kind, "num_bytes": num_bytes, "async": "1"}
                    self.calls.append(Annotation(name, start, end, thread, said))
            elif maybe[row] < 0 and "::" in name and name not in _WRAPPERS and not name.startswith(_BOOKKEEPING):
                op = classify.classify_unknown(events.arguments(signatures[row]))
                if op is not None:
                    works[row] = Work(op, name, start, start, end, end - start, thread, known=False)
                    maybe[row] = row
        out, last = list[Work](), dict[int, Work]()  # the newest by thread
        for work in (works[row] for row in sorted(works)):  # consecutive calls of a thread may be parts of an op
            before = last.get(work.stream)
            in_parts = isinstance(work.work, Op) and work.work.record.in_parts
            if in_parts and before is not None and before.work == work.work:
                before.end, before.own = work.end, before.own + work.own
                before.recorded += work.recorded
            else:
                out.append(work)
                last[work.stream] = work
        return out


def host_call_starts(events: RankEvents, main: int | None) -> Floats:
    """When recorded calls of a thread (None: of all) started, weightless ones of any thread included, in order."""
    ops, runtime, marks = events.ops, events.runtime, [*events.annotations, *events.comms]
    own = np.ones(len(ops), dtype=np.bool_) if main is None else (ops["thread"] == main) | _weightless(events)
    launching = np.array([any(word in name for word in _LAUNCHES) for name in events.names], dtype=np.bool_)
    called = launching[runtime["name"]] & ((runtime["thread"] == main) | (main is None))
    marked = np.array([each.start for each in marks if main is None or each.thread == main], dtype=np.float64)
    return np.sort(np.concatenate([ops.start[own], runtime.start[called], marked]))


def _weightless(events: RankEvents) -> Flags:
    """``(n,)``: which framework calls move nothing."""
    return np.array([name in _WEIGHTLESS for name in events.names], dtype=np.bool_)[events.ops["name"]]
