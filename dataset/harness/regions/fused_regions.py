"""Regions as Inductor fuses them, read from its scheduler; compiling is optional.

Inductor lowers a graph to loops, its scheduler decides which loops one kernel holds, and its code generator which of
them are vectorised.  That takes about a second.  Compiling, which takes many seconds, is what ``read_regions`` leaves
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch._inductor import scheduler as inductor
from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling, TilingSelect
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.ir import NopKernel
from torch._inductor.virtualized import V

from ..plan_error import HarnessError
from .device_schedule import device_answers, on_device
from .region_record import Access, FrameworkOp, Launch, Loop, Region

Compiled: TypeAlias = Callable[..., Any]
OnRegion = Callable[[Region, Any], None]
SETTINGS: dict[str, Any] = {"fx_graph_cache": False, "compile_threads": 1}  # of Inductor: every graph is scheduled anew


class _ReadError(Exception):
    """Raised when the scheduler was read and no code is needed."""


def read_regions(function: Callable[..., Any], inputs: Sequence[Any], *, training: bool = False) -> list[Region]:
    """Regions of a function as Inductor would fuse them, without compiling.

    Args:
        function: What ``torch.compile`` would be given.
        inputs: Its arguments.  Their sizes count; the ops run once, eagerly, on these values.
        training: Whether its backward region is read too: the gradient of the sum of all float outputs.

    Raises:
        HarnessError: If this version of PyTorch cannot be asked.
    """
    found: list[Region] = []
    run_regions(function, inputs, lambda region, _: found.append(region), training=training, compiled=False)
    return found


def run_regions(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    on_region: OnRegion,
    *,
    training: bool = False,
    compiled: bool = True,
) -> None:
    """Run a function under Inductor; ``on_region`` gets each region, and its compiled code (None: nothing compiled).

    Args:
        function, inputs, training: As for ``read_regions``.
        on_region: Called for every region in the order of compilation.
        compiled: Whether code is generated and compiled; otherwise the regions run eagerly.
    """

    torch._dynamo.reset()
    backend = reading_backend(on_region, training=training, compiled=compiled)
    with torch._inductor.config.patch(SETTINGS), torch._functorch.config.patch(enable_autograd_cache=False):
        run = torch.compile(function, backend=backend, dynamic=False)
        outputs = run(*inputs)
        if training:
            total = [each.float().sum() for each in _tensors(outputs) if each.requires_grad]
            if total:
                torch.stack(total).sum().backward()


def reading_backend(on_region: OnRegion, *, training: bool, compiled: bool) -> Compiled:
    """A backend for ``torch.compile`` that reads regions; arguments as for ``run_regions``."""

    def inner(graph: Any, example_inputs: Any, **options: Any) -> Any:
        if not compiled:
            on_region(read_graph(graph, example_inputs, training=training, **options)[0], None)
            return eager(graph)
        read = _Read(_direction(options, training))
        with _hooks(read, stop=False):
            made = compile_fx_inner(graph, example_inputs, **options)
        if read.region is not None:
            on_region(read.region, made)
        return made

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)


def read_graph(
    graph: Any, example_inputs: Sequence[Any], *, training: bool = True, **options: Any
) -> tuple[Region, list[Any]]:
    """The region of a graph that ``compile_fx_inner`` would be given, and the nodes that its ``ops`` stand for.

    Args:
        graph: Of framework ops.
        example_inputs: Its arguments.
        training: Whether a graph that is not a backward is the forward of one.
        options: As ``compile_fx_inner`` takes them.

    Raises:
        HarnessError: If this version of PyTorch cannot be asked.
    """
    read = _Read(_direction(options, training))
    return _region_of(read, lambda: compile_fx_inner(graph, example_inputs, **options))


def read_device_graph(graph: Any, example_inputs: Sequence[Any], **options: Any) -> tuple[Region, list[Any]]:
    """As ``read_graph``, for a GPU: what is fused, without code; inputs are fake tensors on the CPU.

    Raises:
        HarnessError: If this version of PyTorch cannot be asked.
    """
    read = _Read(_direction(options, True))

    def ask() -> None:
        moved, inputs = on_device(graph, example_inputs)
        with device_answers():
            compile_fx_inner(moved, inputs, **options)

    return _region_of(read, ask, code=False)


def _region_of(read: _Read, ask: Callable[[], Any], *, code: bool = True) -> tuple[Region, list[Any]]:
    """The region and its nodes that Inductor makes when it is asked; it does not compile.

    Raises:
        HarnessError: If it makes none.
    """
    try:
        with _hooks(read, stop=True, code=code):
            ask()
    except Exception as error:
        if read.region is None:
            raise HarnessError(f"Inductor of PyTorch {torch.__version__} could not be asked: {error!s:.200}") from error
    if read.region is None:
        raise HarnessError(f"Inductor of PyTorch {torch.__version__} made no region of a graph")
    return read.region, read.nodes


def _direction(options: dict[str, Any], training: bool) -> str:
    return "backward" if options.get("is_backward") else "forward" if training else "inference"


def eager(graph: Any) -> Compiled:
    """What runs a graph as it is, with its arguments in a list."""

    def call(arguments: list[Any]) -> Any:
        return graph(*arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


@dataclass
class _Codegen:
    """The decisions of the code generator, by the name of a loop.

    Attributes:
        calls: Name of the compiled function.
        tiling: Vectorised loops, elements of a vector, and length of the vectorised (or innermost) loop.
        nodes: Loops that code is made of now.
        code: Source of every compiled function by its name.
        launches: Their calls in order.
    """

    calls: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    tiling: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    nodes: Sequence[Any] = ()


@dataclass
class _Read:
    """What was read of a graph.

    Attributes:
        direction: Of the region.
        region: None until the scheduler was asked.
        nodes: Of the graph, as the region numbers its ops.
    """

    direction: str
    region: Region | None = None
    nodes: list[Any] = field(default_factory=list)


@contextmanager
def _hooks(read: _Read, *, stop: bool, code: bool = True) -> Iterator[None]:
    """Record what Inductor decides; with ``stop`` nothing is compiled, and without ``code`` none is made."""
    told = _Codegen()
    schedule: Any = inductor.Scheduler.codegen
    define: Any = CppScheduling.define_kernel
    code_of_nodes: Any = CppKernelProxy.codegen_nodes
    select: Any = TilingSelect.select_tiling

    def record(scheduler: Any) -> Any:
        result = schedule(scheduler) if code else None
        if read.region is None:  # a graph within a graph is part of the first
            read.nodes = [node for node in V.graph.orig_gm.graph.nodes if node.op != "output"]
            with nullcontext() if stop else suppress(Exception):  # what compiles must not fail since it is read
                read.region = _region(scheduler, read.direction, told, read.nodes)
            if stop:
                raise _ReadError
        return result

    def name_kernel(scheduling: Any, source: str, nodes: Any, *rest: Any, **options: Any) -> Any:
        kernel = define(scheduling, source, nodes, *rest, **options)
        loops = [each.get_name() for node in nodes for each in node.get_nodes()]
        told.calls.update(dict.fromkeys(loops, kernel))
        told.code[kernel] = source
        given = rest[0] if rest else options.get("kernel_args") or scheduling.kernel_group.args
        told.launches.append(Launch(kernel, _pointers(given), tuple(loops)))
        return kernel

    def take_nodes(proxy: Any, nodes: Any) -> Any:
        told.nodes = nodes
        return code_of_nodes(proxy, nodes)

    def take_tiling(selecting: Any, functions: Any, sizes: Any) -> Any:
        found = select(selecting, functions, sizes)
        factors, indices = found[:2]
        lengths = [_int(size) for part in max(sizes, key=lambda each: len(each[1])) for size in part]
        inner = lengths[indices[-1]] if indices else lengths[-1] if lengths else 1
        tiling = len(factors), factors[0] if factors else 1, inner
        told.tiling.update({node.get_name(): tiling for node in told.nodes})
        return found

    with (
        mock.patch.object(inductor.Scheduler, "codegen", record),
        mock.patch.object(CppScheduling, "define_kernel", name_kernel),
        mock.patch.object(CppKernelProxy, "codegen_nodes", take_nodes),
        mock.patch.object(TilingSelect, "select_tiling", take_tiling),
    ):
        yield


def _pointers(given: Any) -> dict[str, str]:
    """Names of buffers by the names of the pointers that code has for them."""
    found = {str(inner): str(name) for name, inner in given.input_buffers.items()}
    found |= {inner: str(name) for name, inner in given.output_buffers.items() if isinstance(inner, str)}
    for each in given.inplace_buffers.values():
        if hasattr(each, "inner_name"):
            found[each.inner_name] = str(each.other_names[-1])
    return found


def _region(scheduler: Any, direction: str, told: _Codegen, nodes: Sequence[Any]) -> Region:
    graph = V.graph
    numbers = {node: number for number, node in enumerate(nodes)}
    names = {node.name: number for node, number in numbers.items()}
    loops = []
    for kernel, group in enumerate(scheduler.nodes):
        for node in group.get_nodes():
            if not isinstance(node.node, NopKernel):
                loops.append(_loop(node, kernel, told, names))
    sizes = {name: _buffer_bytes(name) for name in {a.buffer for each in loops for a in (*each.reads, *each.writes)}}
    return Region(
        direction,
        _framework_ops(graph.orig_gm.graph, numbers),
        tuple(loops),
        sizes,
        tuple(graph.graph_inputs),
        tuple(graph.get_output_names()),
        told.code,
        tuple(told.launches),
    )


def _framework_ops(graph: Any, numbers: dict[Any, int]) -> tuple[FrameworkOp, ...]:
    returned = {each for node in graph.nodes if node.op == "output" for each in node.all_input_nodes}
    ops = []
    for node in numbers:
        made = next(_tensors(node.meta.get("val")), None)
        ops.append(
            FrameworkOp(
                str(node.target) if node.op == "call_function" else node.op,
                tuple(int(dim) for dim in made.shape) if made is not None else (),
                made.element_size() if made is not None else 0,
                tuple(numbers[each] for each in node.all_input_nodes),
                node in returned,
            )
        )
    return tuple(ops)


def _loop(node: Any, kernel: int, told: _Codegen, names: dict[str, int]) -> Loop:
    origins = sorted(names[each.name] for each in getattr(node.node, "origins", ()) if each.name in names)
    body = getattr(node, "_body", None)
    extern = "" if body is not None else str(getattr(node.node, "op_overload", None) or type(node.node).__name__)
    outer, reduced = (1, 1)
    if body is not None:
        ranges = node.get_ranges()
        outer, reduced = (math.prod(_int(each) for each in part) for part in ranges)
    outputs = node.get_outputs()
    element = outputs[0].node.get_dtype().itemsize if outputs and outputs[0].node.has_tensor_output() else 0
    return Loop(
        node.get_name(),
        kernel,
        told.calls.get(node.get_name(), ""),
        extern,
        outer,
        reduced,
        element,
        dict(body.op_counts) if body is not None else {},
        _accesses(node.read_writes.reads),
        _accesses(node.read_writes.writes),
        tuple(origins),
        *told.tiling.get(node.get_name(), (0, 1, 1)),
    )


def _accesses(dependencies: Any) -> tuple[Access, ...]:
    found = []
    for each in sorted(dependencies, key=str):
        if each.name not in V.graph.name_to_buffer and each.name not in V.graph.graph_inputs:
            continue
        whole = _buffer_bytes(each.name)
        if not isinstance(each, MemoryDep):
            found.append(Access(each.name, whole, "contiguous"))
            continue
        touched = min(whole, _int(each.get_numel()) * V.graph.get_dtype(each.name).itemsize)
        stride = _inner_stride(each)
        mode = "indirect" if each.is_indirect() else {0: "broadcast", 1: "contiguous"}.get(stride, "strided")
        found.append(Access(each.name, touched, mode, stride if mode == "strided" else 0))
    return tuple(found)


def _inner_stride(access: Any) -> int:
    """Elements between two steps of the innermost loop that has any; 1 without loops."""
    strides = V.graph.sizevars.stride_hints(access.index, access.var_names)
    sizes = [_int(each) for each in access.size]
    inner = [abs(int(stride)) for stride, size in zip(strides, sizes, strict=True) if size > 1]
    return inner[-1] if inner else 1


def _buffer_bytes(name: str) -> int:
    try:
        return _int(V.graph.get_numel(name)) * int(V.graph.get_dtype(name).itemsize)
    except (KeyError, AttributeError, NotImplementedError):  # not a tensor: a generator, or several outputs
        return 0


def _int(value: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(value, fallback=1))
