"""Regions of ``torch.compile`` as Inductor fuses them, read from its scheduler; nothing is compiled.

Inductor lowers a graph to loops, its scheduler decides which loops one kernel holds, and its code generator writes C++
for a CPU.  That takes about a second.  For a GPU only what is fused is decided: tensors and properties of a device
stand in for it, so neither Triton nor CUDA is needed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._inductor import scheduler as inductor
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.ir import NopKernel
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ..base.errors import HarnessError
from ..base.patching import CAPTURED_DEVICE, NoContext, always, cuda_answers, patch
from .loop_counts import Code, Nest, as_int, launch_dims, nests_of

Compiled: TypeAlias = Callable[..., Any]
_DEVICE = "cuda:0"
eager: Callable[[Any], Compiled] = make_boxed_func  # runs a graph as it is, with its arguments in a list


class Access(NamedTuple):
    """A buffer that a loop reads or writes, and the distinct bytes that are touched."""

    buffer: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop nest of Inductor, or a call of a library (an extern kernel)."""

    name: str
    kernel: int  # number of the fused kernel that it is in
    extern: str  # name of the library's op; empty for a loop
    elements: int  # that its loops run over
    element_bytes: int  # of its output's type
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    origins: tuple[int, ...] = ()  # numbers of the framework ops that it computes

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of all that it reads, then of all that it writes."""
        return tuple(access.buffer for access in (*self.reads, *self.writes))


class Launch(NamedTuple):
    """A call of a compiled function: its name, names of its loops, and what their nests do."""

    call: str
    loops: tuple[str, ...]
    nests: tuple[Nest, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """A graph that Inductor compiles as one."""

    direction: str  # ``forward``, ``backward`` or ``inference``
    nodes: tuple[Any, ...]  # framework ops before fusion, in order, as ``origins`` number them
    loops: tuple[Loop, ...]  # after fusion, in the order in which they run
    buffers: Mapping[str, int]  # bytes of every buffer by name; ``inputs`` and ``outputs`` are names of some
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()  # calls of compiled functions in order

    @property
    def dims(self) -> list[tuple[int, ...]]:
        """Dims of the ops ``fused_loops`` that the calls of its compiled functions are, in order."""
        of_loop = {loop: launch for launch in self.launches for loop in launch.loops}
        loops = {loop.name: loop for loop in self.loops}
        found: dict[int, tuple[int, ...]] = {}  # by id of a launch
        passed, touched = 0.0, dict[str, float]()
        for loop in self.loops:
            launch, inside = of_loop.get(loop.name), [loop]
            if launch is not None and id(launch) not in found:
                inside = [loops[name] for name in launch.loops]
                found[id(launch)] = launch_dims(launch.nests, {name: passed - at for name, at in touched.items()})
            elif launch is not None or not loop.extern:
                continue
            for name in dict.fromkeys(buffer for each in inside for buffer in each.buffers):
                passed += self.buffers.get(name, 0)
                touched[name] = passed
        return [found[id(launch)] for launch in self.launches]


def read_region(graph: Any, example_inputs: Sequence[Any], *, on_device: bool = False, **options: Any) -> Region:
    """The region of a graph that ``compile_fx_inner`` would be given; nothing is compiled.

    ``on_device``: for a GPU: what is fused, without code; inputs are fake tensors on the CPU.
    """
    found: list[Region] = []
    why = "it made no region of a graph"
    try:
        given = _on_device(graph, example_inputs) if on_device else (graph, example_inputs)
        answers = _device_answers() if on_device else nullcontext()
        with _reading(found, options, stop=True, code=not on_device), answers:
            compile_fx_inner(*given, **options)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
    if not found:
        raise HarnessError(f"Inductor of PyTorch {torch.__version__} could not be asked: {why:.200}")
    return found[0]


def replace_compile(
    plain: Compiled, backend: Callable[[], Compiled], kept: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> None:
    """Have ``torch.compile`` (``plain``) take another backend, with the options that are kept; None: leave it alone."""

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda given: compiled(given, **options)
        chosen = kept(options) if options.get("backend", "inductor") == "inductor" else None
        return plain(model, **options) if chosen is None else plain(model, backend=backend(), **chosen)

    # else a graph that was compiled before is not scheduled
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    patch(torch, compile=compiled)


def compiling_backend(on_region: Callable[[Region, Any], None]) -> Compiled:
    """A backend for ``torch.compile`` that compiles as ever; ``on_region`` gets each region and its compiled code."""

    def inner(graph: Any, example_inputs: Any, **options: Any) -> Any:
        found: list[Region] = []
        with _reading(found, options, stop=False):
            made = compile_fx_inner(graph, example_inputs, **options)
        if found:
            on_region(found[0], made)
        return made

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)


@contextmanager
def _reading(found: list[Region], options: Mapping[str, Any], *, stop: bool, code: bool = True) -> Iterator[None]:
    """Add what Inductor decides to ``found``; with ``stop`` nothing is compiled, and without ``code`` none is made."""
    calls: list[tuple[str, tuple[str, ...], Code]] = []  # of compiled functions: name, loops and how it is written
    schedule: Any = inductor.Scheduler.codegen
    define: Any = CppScheduling.define_kernel

    def record(scheduler: Any) -> Any:
        result = schedule(scheduler) if code else None
        if not found:  # a graph within a graph is part of the first
            direction = "backward" if options.get("is_backward") else "forward"
            with nullcontext() if stop else suppress(Exception):  # what compiles must not fail since it is read
                found.append(_region(scheduler, direction, calls))
            if stop:
                raise HarnessError("the scheduler was read: nothing is to be compiled")
        return result

    def name_kernel(scheduling: Any, source: str, nodes: Any, *rest: Any, **more: Any) -> Any:
        kernel = define(scheduling, source, nodes, *rest, **more)
        given = rest[0] if rest else more.get("kernel_args") or scheduling.kernel_group.args
        loops = tuple(each.get_name() for node in nodes for each in node.get_nodes())
        buffers = {str(name) for name in (*given.input_buffers, *given.output_buffers)}
        changed = (each.other_names for each in given.inplace_buffers.values() if hasattr(each, "other_names"))
        written = "at::vec::" in source, "transpose_mxn" in source, "exp_u20" in source
        calls.append((kernel, loops, Code(*written, frozenset(buffers.union(*changed)))))
        return kernel

    with (
        mock.patch.object(inductor.Scheduler, "codegen", record),
        mock.patch.object(CppScheduling, "define_kernel", name_kernel),
    ):
        yield


def _region(scheduler: Any, direction: str, calls: Sequence[tuple[str, tuple[str, ...], Code]]) -> Region:
    graph = V.graph
    nodes = tuple(node for node in graph.orig_gm.graph.nodes if node.op != "output")
    numbers = {node.name: number for number, node in enumerate(nodes)}
    loops = tuple(
        _loop(node, kernel, numbers)
        for kernel, group in enumerate(scheduler.nodes)
        for node in group.get_nodes()
        if not isinstance(node.node, NopKernel)
    )
    sizes = {name: _buffer_bytes(name) for name in {buffer for each in loops for buffer in each.buffers}}
    ends = tuple(graph.graph_inputs), tuple(graph.get_output_names())
    named = {node.get_name(): node for group in scheduler.nodes for node in group.get_nodes()}
    launches = tuple(
        Launch(call, inside, nests_of([named[name] for name in inside], code)) for call, inside, code in calls
    )
    return Region(direction, nodes, loops, sizes, *ends, launches)


def _loop(node: Any, kernel: int, numbers: dict[str, int]) -> Loop:
    origins = sorted(numbers[each.name] for each in getattr(node.node, "origins", ()) if each.name in numbers)
    body = getattr(node, "_body", None)
    elements = 1 if body is None else math.prod(as_int(each) for part in node.get_ranges() for each in part)
    extern = "" if body is not None else str(getattr(node.node, "op_overload", None) or type(node.node).__name__)
    outputs = node.get_outputs()
    element = outputs[0].node.get_dtype().itemsize if outputs and outputs[0].node.has_tensor_output() else 0
    touched = _accesses(node.read_writes.reads), _accesses(node.read_writes.writes)
    return Loop(node.get_name(), kernel, extern, elements, element, *touched, tuple(origins))


def _accesses(dependencies: Any) -> tuple[Access, ...]:
    found = []
    for each in sorted(dependencies, key=str):
        if each.name in V.graph.name_to_buffer or each.name in V.graph.graph_inputs:
            touched = _buffer_bytes(each.name)
            if isinstance(each, MemoryDep):
                touched = min(touched, as_int(each.get_numel()) * V.graph.get_dtype(each.name).itemsize)
            found.append(Access(each.name, touched))
    return tuple(found)


def _buffer_bytes(name: str) -> int:
    try:
        return as_int(V.graph.get_numel(name)) * int(V.graph.get_dtype(name).itemsize)
    except (KeyError, AttributeError, NotImplementedError):  # not a tensor: a generator, or several outputs
        return 0


# --- a device that is not there ---------------------------------------------------------------------------------------


def _on_device(graph: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A copy of a graph of framework ops on the CPU, and its fake inputs, as they are on a GPU."""
    made = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in made.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(_moved, node.meta["val"])
        place = lambda each: torch.device(_DEVICE) if isinstance(each, torch.device) else each
        node.args, node.kwargs = tree_map(place, (node.args, node.kwargs))
    return made, [_moved(each) for each in inputs]


def _moved(value: Any) -> Any:
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with value.fake_mode:
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, torch.device(_DEVICE))


# Methods of a tensor that ask for its device, and functions for the same that do not.
_item = torch.Tensor.__getitem__
_UNGUARDED: dict[str, Any] = {
    "__getitem__": lambda x, index: x.select(0, index) if isinstance(index, int) else _item(x, index),
    "__invert__": lambda x: torch.bitwise_not(x),
    "copy_": lambda x, source, non_blocking=False: torch.ops.aten.copy_.default(x, source, non_blocking),
}


@contextmanager
def _device_answers() -> Iterator[None]:
    """``torch.cuda`` and Inductor find the device within the block."""
    state = torch.get_rng_state()
    answers = cuda_answers(1, 0) | {"synchronize": None, "get_rng_state": state, "set_rng_state": None}
    with ExitStack() as stack:
        told = lambda value: staticmethod(always(value))
        properties = {"get_device_properties": told(CAPTURED_DEVICE)}
        triton = {"is_triton_capable": told(True), "raise_if_triton_unavailable": told(None)}
        for owner, values in (
            (torch.cuda, {name: always(value) for name, value in answers.items()}),
            (torch.cuda, {"device": NoContext, "_DeviceGuard": NoContext}),
            (torch.version, {"cuda": "12.8"}),
            (torch.Tensor, _UNGUARDED),
            (CudaInterface, properties | triton),
            (CudaInterface.Worker, properties),
            (inductor, {"has_triton": always(True)}),
        ):
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
