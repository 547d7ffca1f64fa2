"""Cuts a step into parts: over ranks (data and tensor parallelism), in time (micro-batches), and into pipeline stages.

Cutting a label of calls (see ``calls``) is the common rule: data parallelism and micro-batches begin with the batch of
the inputs, tensor parallelism with the parameters of products, and what follows is derived call by call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic

import numpy as np

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.tensors.calls import LINEAR, Factors, Layout, TensorCall, layout_of, no_ops
from stepsight.dataset.tensors.ranks import FORWARD, SUM, Spec, Step, TensorStep, add_ops, ops_of

_OUTERS = (1, 3, 2)  # parts that a product may make at once: queries, keys and values; gate and up
_LOOK_AHEAD = 64  # calls
_ATTENTION_AGAIN = 100  # elements whose sending takes as long as attention to one that every rank does again


_Plan = tuple[tuple[Spec, ...], tuple[Spec, ...]]  # specs of what a call reads, as needed, and of what it writes


class Cutting(Generic[Step]):
    """Cuts the calls of a program into parts, one for each rank of an axis or, without one, each micro-batch."""

    def __init__(self, program: Step, count: int, axis: str, *, batch: bool) -> None:
        self._program, self._count, self._axis = program, count, axis
        self._shapes, self._whole = dict(program.shapes), dict(program.shapes)  # of parts, and of what is cut
        self._calls: list[TensorCall] = []
        self._specs: dict[str, Spec] = {}
        # tensors in another spec than they were written in; what every stage has for itself, by stage
        self._made: dict[tuple[str, Spec, int], str] = {}
        self._free = set() if batch else set(program.parameters)  # that no call has read yet
        self._products = frozenset(self._free)  # parameters whose columns may be cut
        self._arriving: dict[str, Spec] = {}  # inputs that no call has read yet
        self._producer: dict[str, TensorCall] = {}
        self._of_gradient = {name: parameter for parameter, name in program.gradients.items()}
        self._last = {name: place for place, call in enumerate(program.calls) for name in call.reads}
        self._layouts: dict[int, Layout] = {}
        if batch:
            given = [name for name in program.inputs if name not in program.seeds]
            rows = program.shapes[given[0]][:1] if given else ()
            outer = program.num_micro  # a replica takes its part of each micro-batch
            if not rows or rows[0] % (outer * count):
                rule = f"the batch must be a multiple of {outer * count} to be cut"
                raise CaptureError(f"{rule}, got inputs of {rows} rows")
            self._arriving = {name: (0, outer) for name in given if program.shapes[name][:1] == rows}

    def program(self) -> Step:
        """The transformed program."""
        before = self._program
        for place, call in enumerate(before.calls):
            for name in call.reads:  # an input is cut when it is first read; a gradient lies as its output does
                spec = self._arriving.pop(name, None)
                if name in before.seeds and name not in self._specs:
                    spec = self._specs.get(before.seeds[name])
                if isinstance(spec, tuple):
                    self._specs[name] = spec
                    self._name_parts(name, spec)
                    if not self._axis:
                        self._emit_pieces(call, name, spec)
            plan = self._plan(place, self._specs)
            if call.op == "product" and plan[0] == (None, None) and call.reads[1] in self._products:
                plan = self._columns(place) or plan
            self._emit(call, plan)
        specs = {name: self._specs.get(tensor) for name, tensor in before.outputs.items()}
        kept = {name: None if spec == SUM else spec for name, spec in specs.items()}
        outputs = {name: self._as(of, kept[name] if self._axis else None) for name, of in before.outputs.items()}
        gradients = {name: self._as(of, self._specs.get(name)) for name, of in before.gradients.items()}
        made = replace(before, calls=tuple(self._calls), shapes=self._shapes, outputs=outputs, gradients=gradients)
        if not self._axis:
            return made
        lies = {name: self._specs.get(name) for name in (*before.inputs, *before.parameters)} | kept
        laid = {name: (*before.laid.get(name, ()), (self._axis, spec)) for name, spec in lies.items()}
        return replace(made, laid={**before.laid, **laid}, axes={**before.axes, self._axis: self._count})

    def _layout(self, place: int) -> Layout:
        if place not in self._layouts:
            call = self._program.calls[place]
            sides = ([self._whole[name] for name in names] for names in (call.reads, call.writes))
            self._layouts[place] = layout_of(call, *sides)
        return self._layouts[place]

    def _plan(self, place: int, specs: Mapping[str, Spec], chosen: tuple[Any, int] | None = None) -> _Plan:
        """How to cut a call whose inputs lie as ``specs`` say; ``chosen``: label and outer, else by most elements."""
        call, layout = self._program.calls[place], self._layout(place)
        have = [specs.get(name) for name in call.reads]
        of, saved = (call.settings["of"].op, call.settings["saved"]) if call.op == "vjp" else (call.op, 0)
        if {*have[saved:]} == {SUM} and of in LINEAR and not any(have[:saved]):
            return tuple(have), (SUM,) * len(call.writes)
        if call.op == "adamw":
            return (have[0],) * 2, (have[0],)
        options = Counter[tuple[Any, int]]()
        for name, dims, spec in zip(call.reads, layout.reads, have, strict=True):
            found = self._located(dims, spec, layout.whole) if isinstance(spec, tuple) and chosen is None else chosen
            if found is not None:
                options[found] += math.prod(self._whole[name])
        if not options:
            return (None,) * len(have), (None,) * len(call.writes)
        label, outer = max(options, key=options.__getitem__)
        reads = tuple(_spec_of(dims, label, outer, None) for dims in layout.reads)
        return reads, tuple(_spec_of(dims, label, outer, SUM) for dims in layout.writes)

    def _located(self, dims: Factors, spec: tuple[int, int], whole: Iterable[Any]) -> tuple[Any, int] | None:
        """The label that a spec cuts, and the number of rows of it in which it is cut."""
        before = 1
        for label, size in dims[spec[0]]:
            outer = spec[1] // before
            if spec[1] % before == 0 and size % (outer * self._count) == 0 and label not in whole:
                return label, outer
            before *= size
        return None

    def _columns(self, place: int) -> _Plan | None:
        """The cut of a product's columns after which the fewest elements are sent until all is whole again."""
        rows, columns = self._layout(place).reads[1][-2:]
        label, size = next(factor for factor in (*columns, *rows) if factor[0] != "k")
        outers = [outer for outer in _OUTERS if size % (outer * self._count) == 0]
        plans = (self._plan(place, self._specs, (label, outer)) for outer in outers)
        return min(plans, key=lambda plan: self._sent_after(place, plan), default=None)

    def _sent_after(self, place: int, plan: _Plan) -> float:
        specs, sent, calls = dict(self._specs), 0.0, self._program.calls
        specs.update(zip(calls[place].writes, plan[1], strict=True))
        live = {name for name in calls[place].writes if specs[name] is not None}
        for later in range(place + 1, min(place + 1 + _LOOK_AHEAD, len(calls))):
            call = calls[later]
            live = {name for name in live if self._last.get(name, -1) >= later}
            if not live or call.phase != FORWARD:
                break
            if not live & {*call.reads}:
                continue
            plan = self._plan(later, specs)
            for name, spec in zip(call.reads, plan[0], strict=True):
                if name in live and specs[name] != spec:
                    again = _ATTENTION_AGAIN if call.op == "attention" else 1
                    sent += math.prod(self._whole[name]) * (2 if specs[name] == SUM else again)
                    specs[name] = spec
            specs.update(zip(call.writes, plan[1], strict=True))
            live = {name for name in (*live, *call.writes) if specs[name] is not None}
        return sent

    def _emit(self, call: TensorCall, plan: _Plan) -> None:
        """Add a call, after what brings its inputs into the specs that it needs; once for each micro-batch."""
        reads = [self._as(name, spec, call) for name, spec in zip(call.reads, plan[0], strict=True)]
        self._free -= {*call.reads}
        for name, spec in zip(call.writes, plan[1], strict=True):
            self._specs[name], self._producer[name] = spec, call
            self._name_parts(name, spec)
        several = not self._axis and any(spec is not None for spec in (*plan[0], *plan[1]))
        late = self._count - 1 if not self._axis and call.phase != FORWARD else call.micro
        for micro in range(self._count) if several else [None]:
            sides = [
                tuple(_part(name, micro) if spec is not None else name for name, spec in zip(names, specs, strict=True))
                for names, specs in zip((reads, call.writes), plan, strict=True)
            ]
            self._calls.append(replace(call, reads=sides[0], writes=sides[1], micro=late if micro is None else micro))
        for name in call.writes:
            if name in self._of_gradient and self._specs[name] == SUM:
                self._as(name, self._specs.get(self._of_gradient[name]), call)

    def _name_parts(self, name: str, spec: Spec) -> None:
        """Shapes of the parts of a tensor."""
        shape = list(self._whole[name])
        if isinstance(spec, tuple):
            shape[spec[0]] //= self._count
        if spec is not None:
            self._shapes |= dict.fromkeys(self._parts(name), tuple(shape))

    def _parts(self, name: str) -> list[str]:
        return [name] if self._axis else [_part(name, micro) for micro in range(self._count)]

    def _as(self, name: str, want: Spec, call: TensorCall | None = None) -> str:
        """The name of a tensor in the spec that is wanted, which is made for a call if it is not there yet."""
        have, call = self._specs.get(name), call or self._producer[name]
        if have == want:
            return name
        if have is None and name in self._free:
            self._specs[name] = want
            self._name_parts(name, want)
            return name
        key = name, want, call.stage if name in self._program.everywhere else 0
        if key in self._made:
            return self._made[key]
        if have is not None and want is not None:
            return self._made.setdefault(key, self._as(self._as(name, None, call), want, call))
        lies, of_stage = "whole" if want is None else f"at {want}", f" for stage {key[2]}" if key[2] else ""
        made = self._made.setdefault(key, f"{name} {lies} {self._axis or 'micro'}{of_stage}")
        self._shapes[made] = self._whole[made] = self._whole[name]
        plain = replace(call, settings={"axis": self._axis, "count": self._count}, ops=no_ops)
        if have is None:
            self._name_parts(made, want)
            self._emit_pieces(replace(plain, name=name), name, want, made)
        else:
            self._gather(plain, name, have, made)
        return made

    def _gather(self, plain: TensorCall, name: str, have: Spec, made: str) -> None:
        """Make a tensor whole: by a collective, or by adding or joining the parts of micro-batches."""
        parts = self._parts(name)
        at = {"dim": have[0], "outer": have[1]} if isinstance(have, tuple) else {}
        if self._axis or at:
            joined = replace(plain, op="join" if at else "all_reduce", settings={**plain.settings, **at})
            late = plain.micro if self._axis else self._count - 1
            self._calls.append(replace(joined, reads=tuple(parts), writes=(made,), micro=late))
            return
        added = replace(plain, op="add", settings={}, ops=partial(add_ops, dtype=self._program.dtype))
        for micro in range(1, self._count):
            name = made if micro == self._count - 1 else f"{made} {micro}"
            self._shapes[name] = self._shapes[made]
            self._calls.append(replace(added, reads=(parts[0], parts[micro]), writes=(name,), micro=micro))
            parts[0] = name

    def _emit_pieces(self, plain: TensorCall, name: str, spec: Spec, made: str = "") -> None:
        """Cut a whole tensor: each rank takes its part, or each micro-batch."""
        assert isinstance(spec, tuple)
        at = {"axis": self._axis, "count": self._count, "dim": spec[0], "outer": spec[1]}
        piece = replace(plain, op="piece", reads=(name,), ops=no_ops)
        for micro in [None] if self._axis else range(self._count):
            made_part, when = (_part(made or name, micro),), plain.micro if micro is None else micro
            self._calls.append(replace(piece, writes=made_part, micro=when, settings={**at, "at": micro}))


def _part(name: str, micro: int | None) -> str:
    return name if micro is None else f"{name} #{micro}"


def _spec_of(dims: Factors, label: Any, outer: int, without: Spec) -> Spec:
    """How a tensor is cut along a label: ``without`` if it does not have it."""
    for place, factors in enumerate(dims):
        before = 1
        for each, size in factors:
            if each == label:
                return place, before * outer
            before *= size
    return without


def staged(program: Step, stages: int) -> Step:
    """Assign calls to stages by the call of the file that they come from, and send tensors between stages."""
    stage_of, everywhere = _stages(program, stages), program.everywhere
    home: dict[str, int] = {}
    calls: list[TensorCall] = []
    shapes = dict(program.shapes)
    for call in program.calls:
        stage = stage_of[call.origin]
        reads = []
        for name in call.reads:
            source = stage if name in everywhere else home.setdefault(name, stage)
            sent = name if source == stage else f"{name} on stage {stage}"
            if home.setdefault(sent, stage) == stage and sent not in shapes:
                shapes[sent] = shapes[name]
                send = replace(call, op="send", reads=(name,), writes=(sent,), settings={"to": stage}, ops=no_ops)
                calls.append(replace(send, stage=source))
            reads.append(sent)
        home |= dict.fromkeys(call.writes, stage)
        calls.append(replace(call, reads=tuple(reads), stage=stage))
    return replace(program, calls=tuple(calls), shapes=shapes, num_stages=stages)


def _stages(program: TensorStep, stages: int) -> list[int]:
    """The stage of each call of the file: of about equal FLOP, cut where little has to be sent."""
    count = max(call.origin for call in program.calls) + 1
    flops, crossing = np.zeros(count), np.zeros(count + 1)
    first, last = dict[str, int](), dict[str, int]()
    for call in program.calls:
        if call.phase == FORWARD:
            flops[call.origin] += sum(op.flops for op in ops_of(program, call))
            first |= {name: call.origin for name in call.writes if name not in first}
            last |= dict.fromkeys(call.reads, call.origin)
    for name, origin in first.items():
        crossing[origin + 1 : max(last.get(name, origin), origin) + 1] += math.prod(program.shapes[name])
    done = np.concatenate([[0.0], np.cumsum(flops + 1e-6 * flops.sum() / count)])
    done /= done[-1]
    borders = [0]
    for stage in range(1, stages):
        near = np.flatnonzero(np.abs(done - stage / stages) < 0.3 / stages)
        near = near[near > borders[-1]]
        if not len(near):
            rule = f"{stages} stages must each have near an equal share of the FLOP"
            raise CaptureError(f"{rule}, which {count} calls do not give")
        borders.append(int(min(near, key=lambda place: (crossing[place], abs(done[place] - stage / stages)))))
    return [sum(border <= origin for border in borders[1:]) for origin in range(count)]
