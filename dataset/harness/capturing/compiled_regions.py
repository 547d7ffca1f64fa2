"""Regions of ``torch.compile`` in a captured script: what Inductor makes of them, as nodes.

For a CPU, a call of a compiled function (several fused loops) is one op, ``fused_loops``; for a GPU, each fused kernel
is one op, ``fused``, by the bytes that it reads and writes.  A call of a library is the op that it is without a
compiler.  Inductor is asked before it compiles anything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.variables import builder
from torch._functorch import partitioners
from torch._inductor.compile_fx import compile_fx
from torch.fx import Node
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..base import one_rank_group
from ..base.errors import HarnessError
from ..base.patching import patch
from ..regions.inductor import Loop, Region, eager, read_region, replace_compile
from . import distributed, fake_tensors, recorder, value_estimates
from .fake_tensors import BACKWARD, FORWARD, FakeWorld
from .recorder import COMPOSITE, OP, signature_of, storage_of

FUSED, KERNEL = "fused_loops", "fused"
_NO_CALL = "MultiOutput"  # parts of what a library returned


def install(world: FakeWorld, plain: Callable[..., Any], *, on_host: bool) -> None:
    """Let ``torch.compile`` (``plain``) read regions instead of compiling; ``on_host``: the script finds no GPU."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for module in (one_rank_group, distributed, fake_tensors, recorder, value_estimates):
        trace_rules.add(module.__name__)  # what runs beneath the script is no part of it
    # Recomputed random ops read a saved state of the generator: a host's call without a kernel.
    patch(partitioners, functionalize_rng_ops=lambda joint, forward, backward, symbols: (forward, backward))
    if not on_host:  # what the compiler cannot trace beside the fake device runs as it is written
        torch._dynamo.config.suppress_errors = True
    wrapped = builder.wrap_to_fake_tensor_and_record

    def wrap(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():  # dynamo makes views anew, and they must be of its own mode
            return wrapped(*args, **options)

    patch(builder, wrap_to_fake_tensor_and_record=wrap)

    def inner(graph: Any, example_inputs: Any, **options: Any) -> Any:
        if not any(node.op == "call_function" for node in graph.graph.nodes):
            return eager(graph)
        if any(map(communicates, graph.graph.nodes)):  # no kernel goes across a collective
            return eager(_split(graph, partial(inner, **options | {"static_input_idxs": ()})))
        sizes = (size for each in example_inputs for size in (each.shape if isinstance(each, Tensor) else (each,)))
        if any(isinstance(size, torch.SymInt) for size in sizes):
            world.recorder.note("a compiled region runs as it is written: its shapes are marked as dynamic")
            return eager(graph)
        for on_device in (False,) if on_host else (True, False):
            try:
                with _disable_current_modes():
                    region = read_region(graph, example_inputs, on_device=on_device, **options)
                return eager(_Region(world, graph, region, (_host_calls if on_host else _device_calls)(region)))
            except HarnessError as error:
                instead = "is fused as for a CPU" if on_device else "runs as it is written"
                world.recorder.note(f"a compiled region {instead}: {error!s:.300}")
        return eager(graph)

    def backend(graph: Any, example_inputs: Any) -> Any:
        with _disable_current_modes():  # within DDP's forward dynamo leaves them on
            return compile_fx(graph, example_inputs, inner_compile=inner)

    def kept(options: dict[str, Any]) -> dict[str, Any] | None:
        """A region is read for the shapes of each call, so that its ops have sizes."""
        full = bool(on_host and options.get("fullgraph"))
        return None if options.get("disable") else {"dynamic": False, "fullgraph": full}

    replace_compile(plain, lambda: backend, kept)


def communicates(node: Node) -> bool:
    """Whether a node of a graph is a collective, or waits for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def between_collectives(graph: Any) -> torch.fx.GraphModule:
    """The graph as modules that follow each other: those of collectives alone, and what is between them."""
    number, before = 0, False
    numbers: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            number, before = number + (communicates(node) != before), communicates(node)
        numbers[node.name] = number
    return split_module(graph, graph, lambda node: numbers[node.name])


def _split(graph: Any, compiled: Callable[..., Any]) -> torch.fx.GraphModule:
    """The graph with every part between its collectives compiled by itself."""
    parts = between_collectives(graph)
    part: Any
    for name, part in list(parts.named_children()):
        if not any(map(communicates, part.graph.nodes)):
            end = part.graph.output_node()
            end.args = (end.args[0] if isinstance(end.args[0], tuple) else (end.args[0],),)
            part.recompile()
            given = [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]
            setattr(parts, name, _Part(compiled(part, given)))
    return parts


class _Part(torch.nn.Module):
    """A part of a region, which takes its arguments one by one."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *arguments: Any) -> Any:
        found = self._run(list(arguments))
        return found[0] if len(found) == 1 else found


_Call = tuple[str, tuple[str, ...], tuple[Any, ...]]  # of a compiled function: its name, its loops, the op that it is


def _host_calls(region: Region) -> list[_Call]:
    """Calls of compiled functions for a CPU, each of several fused groups."""
    launches = zip(region.launches, region.dims, strict=True)
    return [(launch.call, launch.loops, (COMPOSITE, FUSED, dims, "fp32")) for launch, dims in launches]


def _device_calls(region: Region) -> list[_Call]:
    """Kernels of a GPU: every group of fused loops is one."""
    groups = defaultdict[int, list[Loop]](list)
    for loop in region.loops:
        if not loop.extern:
            groups[loop.kernel].append(loop)
    made: list[_Call] = []
    for number, loops in groups.items():
        num_bytes, element = kernel_bytes(region, loops)
        work = COMPOSITE, KERNEL, (max(num_bytes // (2 * element), 1),), "bf16" if element == 2 else "fp32"
        made.append((f"fused_{number}", tuple(loop.name for loop in loops), work))
    return made


def kernel_bytes(region: Region, loops: Sequence[Loop]) -> tuple[int, int]:
    """Bytes that the loops of a fused kernel read from and write to memory, and of an element of its largest buffer."""
    own = {loop.name for loop in loops}
    made = {access.buffer for loop in loops for access in loop.writes}
    outside = {access.buffer for loop in region.loops if loop.name not in own for access in loop.reads}
    kept = made & {*outside, *region.outputs, *region.inputs}
    moved, sizes = Counter[tuple[str, bool]](), Counter[int]()
    for loop in loops:
        sizes[loop.element_bytes] += loop.elements
        for writes, accesses in enumerate((loop.reads, loop.writes)):
            for name, num_bytes in accesses:
                if name in kept if writes else name in region.buffers and name not in made:
                    moved[name, bool(writes)] = max(moved[name, bool(writes)], num_bytes)
    return moved.total(), 2 if sizes.most_common(1)[0][0] == 2 else 4


class _Region:
    """A region that runs without values, and writes its nodes down."""

    def __init__(self, world: FakeWorld, graph: Any, region: Region, calls: Sequence[_Call]) -> None:
        self._world, self._graph, self._region = world, graph, region
        self._calls = {loop: call for call in calls for loop in call[1]}
        self._loops = {loop.name: loop for loop in region.loops}
        self._last_use = {name: place for place, loop in enumerate(region.loops) for name in loop.buffers}

    def __call__(self, *arguments: Any) -> Any:
        recorder, region = self._world.recorder, self._region
        if not recorder.active:
            return self._graph(*arguments)
        with recorder.paused():
            outputs = self._graph(*arguments)
        made = (each for each in outputs if isinstance(each, Tensor))
        given = (*zip(region.inputs, arguments, strict=False), *zip(region.outputs, made, strict=False))
        storages = {name: storage_of(each) for name, each in given if isinstance(each, Tensor)}
        kept = {*storages}  # what is between kernels lives as long as it is used
        scope = (BACKWARD if region.direction == "backward" else FORWARD, -1, self._world.scope()[2])
        done: set[int] = set()
        for place, loop in enumerate(region.loops):
            call = self._calls.get(loop.name)
            if call is None and loop.extern and loop.extern != _NO_CALL:
                self._library(place, loop, storages, scope)
            elif call is not None and id(call) not in done:
                done.add(id(call))
                name, loops, work = call
                reads = {access.buffer for each in loops for access in self._loops[each].reads}
                writes = {access.buffer for each in loops for access in self._loops[each].writes}
                touched = self._storages(reads - writes, storages), self._storages(writes, storages)
                recorder.add((OP, recorder.work(work), -1, name), *touched, scope)
            for name in {*loop.buffers} - kept:
                if self._last_use[name] <= place:
                    storages.pop(name, None)
        return outputs

    def _library(self, place: int, loop: Loop, storages: dict[str, Any], scope: Any) -> None:
        """Write a call of a library down: of the ops that it computes, the one of its name."""
        packet, recorder = loop.extern.rpartition(".")[0] or loop.extern, self._world.recorder
        nodes = (self._region.nodes[number] for number in reversed(loop.origins))
        calls = (node for node in nodes if isinstance(node.target, torch._ops.OpOverload))
        node = next((node for node in calls if str(node.target).rpartition(".")[0] == packet), None)
        if node is None:
            recorder.note(f"a compiled region calls {loop.extern}, which is left out")
            return
        value = lambda each: each.meta.get("val") if isinstance(each, Node) else each  # tensors without values
        args, kwargs = tree_map(value, (node.args, node.kwargs), is_leaf=lambda each: isinstance(each, Node))
        outputs = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
        work = recorder.work(signature_of(node.target, args, kwargs, outputs))
        reads, made = ({access.buffer for access in side} for side in (loop.reads, loop.writes))
        for part in self._region.loops[place + 1 :]:
            if part.extern == _NO_CALL and made & {access.buffer for access in part.reads}:
                made |= {access.buffer for access in part.writes}
        touched = self._storages(reads, storages), self._storages(made, storages)
        recorder.add((OP, work, -1, node.target._schema.name), *touched, scope)

    def _storages(self, names: Iterable[str], known: dict[str, Any]) -> Iterator[Any]:
        """Storages of buffers; those between kernels are made when they are first used."""
        for name in sorted(names):
            if name not in known and (size := self._region.buffers.get(name, 0)):
                known[name] = storage_of(torch.empty(size, dtype=torch.uint8))
            if name in known:
                yield known[name]
