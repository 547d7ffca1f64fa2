"""The program of one rank of a tensor step: its kernels, collectives and messages in the order of their issue."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from stepsight.dataset.base.errors import CaptureError
from stepsight.dataset.capture.captured import COMPOSITE, CapturedRank, graph_of_record
from stepsight.dataset.graph.columns import PHASES
from stepsight.dataset.graph.program import COLLECTIVE, OP
from stepsight.dataset.kinds.op import DTYPE_BYTES, Op
from stepsight.dataset.tensors.calls import UNSAVED, Array, Shapes, TensorCall, gradients_of, no_ops, streamed

PRECISIONS = ("fp32", "bf16", "fp16")
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bucket sizes of DDP in bytes: the first one, and all others
_STATES = 2  # copies of the parameters during training beside gradients: two moments
_Of = tuple[TensorCall, Iterable[int]]  # the call that a node comes from, and the nodes that it waits for


def _numbers(*first: str) -> defaultdict[Any, int]:
    """A table that numbers its keys as they come."""
    found: defaultdict[Any, int] = defaultdict(lambda: len(found), zip(first, itertools.count(), strict=False))
    return found


def rank_of(step: TensorStep, stage: int, devices_per_node: int) -> CapturedRank:
    """The program of the first rank of a pipeline stage, and its memory."""
    return graph_of_record(_Rank(step, stage).record(), devices_per_node)


class _Rank:
    """Nodes in the form in which a captured process writes them."""

    def __init__(self, step: TensorStep, stage: int) -> None:
        self._step, self._stage, self._ranks = step, stage, _groups(step)
        self._gradients = frozenset(step.gradients.values())
        self._streams, self._works, self._names = _numbers("compute"), _numbers(), _numbers()
        self._groups: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._nodes: list[list[int]] = []
        self._edges: list[list[Any]] = []
        self._live: list[int] = []
        self._made_by: dict[str, tuple[int, ...]] = {}  # nodes that a tensor waits for
        self._bucket: list[TensorCall] = []
        self._limit, self._updated = _FIRST_BUCKET, list[str]()
        self._counts = Counter[str]()  # of nodes by stream
        of_stage = [each for each in enumerate(step.calls) if stage in (each[1].stage, each[1].settings.get("to"))]
        self._issued = sorted(of_stage, key=lambda each: self._turn(each[1]))
        self._ops = {number: ops_of(step, call) for number, call in of_stage}
        self._root, self._last = dict[str, str](), dict[str, int]()
        for place, (number, call) in enumerate(self._issued):
            roots = [self._root.get(name, name) for name in call.reads]
            self._last |= dict.fromkeys(roots, place)
            if call.op in ("all_reduce", "adamw"):  # whether what it writes takes no memory of its own
                in_place = call.op == "adamw" or call.writes[0] in self._gradients
            else:
                in_place = call.op not in ("send", "join") and not self._ops[number]
            if roots and in_place:
                self._root |= dict.fromkeys(call.writes, roots[0])
        own = {name for _, call in of_stage if call.stage == stage for name in call.reads} & {*step.parameters}
        self._bytes = sum(map(self._size, own)) * (1 + _STATES * bool(step.gradients))
        self._held: dict[str, int] = {}

    def _turn(self, call: TensorCall) -> tuple[float, int]:
        """When a call and messages are issued in 1F1B: each backward after the forwards that fill later stages."""
        if call.phase == OPTIMIZER:
            return math.inf, 0
        return call.micro + (self._step.num_stages - 1 - self._stage) * (call.phase == BACKWARD), call.phase

    def record(self) -> dict[str, Any]:
        """The record; the last reductions come after all calls, and one kernel that updates all parameters."""
        step, outputs = self._step, {self._root.get(name, name) for name in self._step.outputs.values()}
        for place, (number, call) in enumerate(self._issued):
            self._add(number, call)
            for name in {self._root.get(name, name) for name in (*call.reads, *call.writes)} - outputs:
                if self._last.get(name, place) <= place:  # no later call reads it
                    self._bytes -= self._held.pop(name, 0)
        self._flush(0)
        if self._updated:
            numel = sum(math.prod(step.shapes[name]) for name in self._updated)
            before = self._before(step.gradients[name] for name in self._updated)
            op = Op("adamw", (numel, len(self._updated)), step.dtype)
            self._op(op, TensorCall("adamw", (), (), name="adamw", phase=OPTIMIZER), before)
        return {
            **{"rank": self._ranks["pp"][self._stage], "world_size": step.world_size},
            **{"works": list(self._works), "names": list(self._names), "streams": list(self._streams)},
            **{"nodes": self._nodes, "live_bytes": self._live, "edges": self._edges, "notes": list(step.notes)},
            "groups": [[name, list(ranks)] for name, (_, ranks) in self._groups.items()],
        }

    def _add(self, number: int, call: TensorCall) -> None:
        """Add a call of this rank; ``number``: its place in the step."""
        before = made = self._before(call.reads)
        for name in call.writes:
            if name not in self._root:
                self._held[name] = self._size(name)
                self._bytes += self._held[name]
        axis = call.settings.get("axis", "")
        if call.op == "send":
            made = self._send(number, call, before)
        elif call.op == "all_reduce" and call.writes[0] in self._gradients:
            self._bucket.append(call)
            self._flush(self._limit)
        elif call.op == "all_reduce" or (call.op == "join" and axis):
            kind = "all_reduce" if call.op == "all_reduce" else "all_gather"
            made = (self._collective(kind, self._size(call.writes[0]), axis, (call, before)),)
        elif call.op == "adamw":
            self._updated.append(call.reads[0])
            self._flush(0)
            made = self._before(call.reads)
        else:
            for op in self._ops[number]:
                made = (self._op(op, call, made),)
        self._made_by |= dict.fromkeys(call.writes, self._made_by.get(call.writes[0], made))

    def _size(self, name: str) -> int:
        return math.prod(self._step.shapes[name]) * DTYPE_BYTES[self._step.dtype]

    def _before(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(node for name in names for node in self._made_by.get(name, ())))

    def _op(self, op: Op, call: TensorCall, before: Iterable[int]) -> int:
        dtype = self._step.precision if self._step.precision and op.dtype in PRECISIONS else op.dtype
        return self._node(OP, (COMPOSITE, op.kind, op.dims, dtype, call.known), "compute", (call, before))

    def _collective(self, kind: str, size: int, axis: str, of: _Of, stream: str = "") -> int:
        first = 0 if axis.startswith("pp") else self._ranks["pp"][self._stage]
        ranks = tuple(first + rank for rank in self._ranks[axis])
        name = axis if axis.startswith("pp") or self._step.num_stages == 1 else f"{axis}_stage{self._stage}"
        group = self._groups.setdefault(name, (len(self._groups), ranks))
        return self._node(COLLECTIVE, ("collective", kind, size, group[0]), stream or axis, of)

    def _send(self, number: int, call: TensorCall, before: tuple[int, ...]) -> tuple[int, ...]:
        """One side of a message, on a stream of its own; the receiver waits for nothing else."""
        pair = tuple(sorted((call.stage, call.settings["to"])))
        axis, waits_for = f"pp_{pair[0]}_{pair[1]}", before if call.stage == self._stage else ()
        self._ranks[axis] = tuple(self._ranks["pp"][stage] for stage in pair)
        stream = f"pp {call.reads[0].partition(' #')[0]} to {call.settings['to']}"
        node = self._collective("send_recv", self._size(call.reads[0]), axis, (call, waits_for), stream)
        self._nodes[node][-1] = number
        return (node,)

    def _flush(self, limit: int) -> None:
        """Reduce the gradients that are ready, as DDP does, if they are at least ``limit`` bytes."""
        for axis in dict.fromkeys(call.settings["axis"] for call in self._bucket):
            calls = [call for call in self._bucket if call.settings["axis"] == axis]
            names = [name for call in calls for name in call.reads]
            size = sum(map(self._size, names))
            if size >= limit:
                node = self._collective("all_reduce", size, axis, (calls[-1], self._before(names)))
                self._made_by |= {call.writes[0]: (node,) for call in calls}
                self._bucket = [call for call in self._bucket if call.settings["axis"] != axis]
                self._limit = _BUCKET

    def _node(self, kind: int, work: Any, stream: str, of: _Of) -> int:
        (call, before), node = of, len(self._nodes)
        sequence = self._counts[stream] if kind == COLLECTIVE else -1
        self._counts[stream] += 1
        places = self._works[work], self._streams[stream], call.phase, self._names[call.name]
        self._nodes.append([kind, *places, -1, -1, sequence])
        for source in before:
            alike = kind == OP and self._nodes[source][0] == OP
            self._edges.append([source, node, "data" if alike else "synchronisation"])
        self._live.append(self._bytes)
        return node


def _groups(step: TensorStep) -> dict[str, tuple[int, ...]]:
    """Ranks of the first rank's group along each axis: tensor-parallel ranks are neighbours, stages furthest apart."""
    found, stride = {}, 1
    sizes = {**step.axes, "pp": step.num_stages}
    for name in (*sorted(step.axes, key=lambda axis: not axis.startswith("tp")), "pp"):
        found[name] = tuple(stride * at for at in range(sizes[name]))
        stride *= sizes[name]
    return found


def ops_of(step: TensorStep, call: TensorCall) -> Sequence[Op]:
    """Kernels of a call on the shapes of one rank."""
    reads, writes = ([step.shapes[name] for name in names] for names in (call.reads, call.writes))
    if call.op != "vjp":
        return call.ops(reads, writes)
    of, saved = call.settings["of"], call.settings["saved"]
    inputs, made = (reads[:saved], reads[saved:]) if saved else (writes, reads)
    if of.op == "add" and of.settings.get("bias"):
        rows = math.prod(made[0][:-1])
        return [Op("bias_grad", (rows, made[0][-1]), step.dtype)] if rows * made[0][-1] else []
    wanted, weights = (
        frozenset(itertools.compress(of.reads, call.settings[name])) for name in ("wanted", "parameters")
    )
    forward = call.ops(inputs, made)
    if not forward and of.op in ("split", "index"):  # autograd copies the gradients of views of parts
        return [op for op in [streamed("copy", inputs[0], step.dtype)] if op]
    return [op for each in reversed(forward) for op in gradients_of(each, wanted - weights, weights)]


def check_counts(most: int = 2**31, /, **counts: object) -> None:
    """Raise ``CaptureError`` unless every count is a whole number of at least 1."""
    for name, count in counts.items():
        if type(count) is not int or not 1 <= count <= most:
            raise CaptureError(f"{name} must be a whole number of at least 1 and at most {most}, got {count!r:.80}")


SUM = "sum"  # how a tensor lies on the ranks of an axis: None whole; (dim, outer) in parts; SUM still to be added up
Spec = None | str | tuple[int, int]
FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))
Step = TypeVar("Step", bound="TensorStep")


@dataclass(frozen=True)
class TensorStep:
    """A step of a model on all of its ranks."""

    calls: tuple[TensorCall, ...]  # in an order in which they can run
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors, on one rank
    inputs: tuple[str, ...]  # names of what the user gives besides parameters
    parameters: tuple[str, ...]  # names of what training updates
    # names in the file, and of the tensors that hold them; with training also updated parameters (new <name>) and
    # gradients (gradient of <name>)
    outputs: Mapping[str, str]
    constants: Mapping[str, Array] = field(default_factory=dict)  # values in the file
    seeds: Mapping[str, str] = field(default_factory=dict)  # inputs that are gradients of outputs, and those
    gradients: Mapping[str, str] = field(default_factory=dict)  # of parameters
    dtype: str = "fp32"  # of parameters and most activations
    # names and sizes of the axes that ranks lie on, as transforms added them
    axes: Mapping[str, int] = field(default_factory=dict)
    # how inputs, parameters and outputs lie on axes: axis and spec, in the order of the transforms
    laid: Mapping[str, tuple[tuple[str, Spec], ...]] = field(default_factory=dict)
    num_micro: int = 1  # micro-batches
    num_stages: int = 1  # pipeline stages
    precision: str = ""  # type of floating point instead of that in the file; empty: as there
    notes: tuple[str, ...] = ()  # what the user should know

    @property
    def everywhere(self) -> frozenset[str]:
        """Names of what each pipeline stage that reads it has for itself: constants, and parameters that stay."""
        return frozenset([*self.constants, *(() if self.gradients else self.parameters)])

    @property
    def world_size(self) -> int:
        return self.num_stages * math.prod(self.axes.values())


def add_ops(reads: Shapes, writes: Shapes, dtype: str = "fp32") -> list[Op]:
    """Of an addition."""
    return [op for op in [streamed("add", writes[0], dtype)] if op]


def with_backward(program: Step) -> Step:
    """A step with gradients of all parameters, and AdamW's update of them, after its forward.

    Raises:
        CaptureError: If it has no parameters, or is transformed already.
    """
    if not program.parameters:
        raise CaptureError("a model must have parameters to be trained, got none: use its forward (--inference)")
    if program.world_size * program.num_micro > 1 or program.gradients:
        got = f"got one on {program.world_size} ranks with {len(program.gradients)} gradients"
        raise CaptureError(f"a program must be trained before it is transformed, {got}")
    wanted, shapes = set(program.parameters), dict(program.shapes)
    for call in program.calls:
        if wanted & {*call.reads}:
            wanted |= {*call.writes}
    seeds = {f"gradient of {name}": tensor for name, tensor in program.outputs.items() if tensor in wanted}
    shapes |= {seed: shapes[tensor] for seed, tensor in seeds.items()}
    found, calls, count = {tensor: seed for seed, tensor in seeds.items()}, list(program.calls), itertools.count()

    def add(call: TensorCall, op: str, reads: Sequence[str], made: Sequence[str], **more: Any) -> list[str]:
        names = [f"d{next(count)} {name}" for name in made]
        shapes.update(zip(names, (shapes[name] for name in made), strict=True))
        calls.append(replace(call, op=op, reads=tuple(reads), writes=tuple(names), phase=BACKWARD, **more))
        return names

    for call in reversed(program.calls):
        made = [name for name in call.reads if name in wanted]
        if not made or not found.keys() & {*call.writes}:
            continue
        for name in call.writes:
            if name not in found:
                (found[name],) = add(call, "zeros", [name], [name], settings={}, ops=no_ops)
        saved = 0 if call.op in UNSAVED and len(made) == len(call.reads) else len(call.reads)
        settings = {"of": call, "saved": saved, "wanted": tuple(name in wanted for name in call.reads)}
        settings["parameters"] = tuple(name in program.parameters for name in call.reads)
        reads = [*call.reads[:saved], *(found[name] for name in call.writes)]
        for name, gradient in zip(made, add(call, "vjp", reads, made, settings=settings), strict=True):
            if name in found:
                ops = partial(add_ops, dtype=program.dtype)
                (gradient,) = add(call, "add", [found[name], gradient], [name], settings={}, ops=ops)
            found[name] = gradient
    gradients = {name: found[name] for name in program.parameters if name in found}
    first = {name: call for call in reversed(program.calls) for name in call.reads}
    for name, gradient in gradients.items():
        shapes[f"new {name}"], origin = shapes[name], first[name].origin
        calls.append(TensorCall("adamw", (name, gradient), (f"new {name}",), phase=OPTIMIZER, origin=origin))
    outputs = {**program.outputs, **{f"new {name}": f"new {name}" for name in gradients}}
    outputs |= {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    made_all = replace(program, calls=tuple(calls), shapes=shapes, inputs=(*program.inputs, *seeds))
    return replace(made_all, outputs=outputs, seeds=seeds, gradients=gradients)


def with_replicas(program: Step, count: int) -> Step:
    """A step on one of ``count`` equal replicas, each with a batch of its own as large as the file's."""
    if count == 1:
        return program
    whole, calls = {name: f"{name} of all replicas" for name in program.gradients.values()}, list[TensorCall]()
    settings = {"axis": "dp", "count": count}
    for call in program.calls:
        reads = tuple(whole.get(name, name) for name in call.reads) if call.op == "adamw" else call.reads
        calls.append(replace(call, reads=reads))
        reduced = replace(call, op="all_reduce", settings=settings, ops=no_ops)
        calls += [replace(reduced, reads=(name,), writes=(whole[name],)) for name in call.writes if name in whole]
    shapes = {**program.shapes, **{made: program.shapes[name] for name, made in whole.items()}}
    gradients = {parameter: whole[name] for parameter, name in program.gradients.items()}
    return replace(program, calls=tuple(calls), shapes=shapes, gradients=gradients, axes={"dp": count})
