"""Annotations in traces: segments, composite ops, collectives and waits.

PyTorch's profiler sees kernels, but not what they are for: with gloo a trace names no group, no message
size and no wait.  ``install`` wraps the c10d calls of ``torch.distributed`` and ``Work.wait`` once; while
``recording`` is off (every step whose time counts) a wrapped call costs one extra Python call.  Names are
free of quotes, so that they survive in JSON as they are::

    stepsight::segment label=forward micro_batch=0 stage=0
    stepsight::op kind=swiglu dims=4096 dtype=fp32
    stepsight::collective kind=all_reduce num_bytes=4096 ranks=0,1 group=tp seq=3 async=0
    stepsight::collective kind=send_recv num_bytes=4096 ranks=0,1 group=pp seq=0 async=1 direction=send
    stepsight::wait seq=3 group=tp
    stepsight::modelled seconds=0.001

``seq`` counts the calls of one rank in one group: equal for all ranks of a collective, and for a
point-to-point message only an identity (the n-th send to a peer meets the peer's n-th receive).

``modelled`` is within a collective that a stand-in only waits for, and tells how long.

The all-reduces that DDP issues from C++ cannot be wrapped; in a gloo trace they are the ``gloo:all_reduce``
spans, in an NCCL trace ``record_param_comms``.  A Python hook would show them, and would change their timing.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .collective_calls import WRAPPED
from .patching import patched

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_NOTHING: AbstractContextManager[None] = nullcontext()
Span = tuple[str, int, int, float, float]  # label, stage, micro-batch (-1: none), start and end in monotonic seconds


class _Recorder:
    """The state of the recording; one per process, like the profiler."""

    def __init__(self) -> None:
        self.active = self.installed = False
        self.group_names: dict[str, str] = {}
        self.sequence = Counter[str]()
        self.pending: dict[int, tuple[Any, str]] = {}  # by id of a work: it, kept alive, and its wait
        self.spans: list[Span] | None = None
        self.inside = threading.local()  # a ``call``: c10d functions call each other


_recorder = _Recorder()


@contextmanager
def recording() -> Iterator[None]:
    """Annotate the work of the block."""
    _recorder.active = True
    _recorder.sequence.clear()
    try:
        yield
    finally:
        _recorder.active = False
        _recorder.pending.clear()


def active() -> bool:
    """Whether work is being recorded."""
    return _recorder.active


def noting(spans: list[Span]) -> AbstractContextManager[None]:
    """Record the begin and end of segments only, which costs almost nothing."""
    return patched(_recorder, spans=spans)


@contextmanager
def _noted(spans: list[Span], label: str, stage: int, micro_batch: int) -> Iterator[None]:
    start = time.monotonic()
    yield
    spans.append((label, stage, micro_batch, start, time.monotonic()))


def name_groups(groups: Mapping[str, dist.ProcessGroup | None]) -> None:
    """Name the process groups of a run in annotations (``tp``, ``dp``, ``pp``); others are called ``world``."""
    _recorder.group_names = {group.group_name: name for name, group in groups.items() if group is not None}


def segment(label: str, **facts: int) -> AbstractContextManager[Any]:
    """A part of a step: ``forward``, ``backward``, ``optimizer``, or the ``step`` itself."""
    if _recorder.spans is not None:
        return _noted(_recorder.spans, label, facts.get("stage", 0), facts.get("micro_batch", -1))
    if not _recorder.active:
        return _NOTHING
    words = [f"label={label}", *(f"{key}={value}" for key, value in facts.items())]
    return torch.profiler.record_function("stepsight::segment " + " ".join(words))


def op(kind: str, dims: Iterable[int], dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A composite op: everything within is one op of this signature."""
    if not _recorder.active:
        return _NOTHING
    sizes = "x".join(map(str, dims))
    return torch.profiler.record_function(f"stepsight::op kind={kind} dims={sizes} dtype={DTYPE_NAMES[dtype]}")


def waiting(work: Any) -> AbstractContextManager[Any]:
    """A wait for the work of an annotated call."""
    pending = _recorder.pending.pop(id(work), None) if _recorder.pending else None
    return _NOTHING if pending is None else torch.profiler.record_function(pending[1])


def stood_in(kind: str, num_bytes: int, ranks: Iterable[int], name: str, seconds: float) -> AbstractContextManager[Any]:
    """The collective of an emulated rank; if no wrapped call encloses it (DDP's from C++), all of its facts."""
    if not _recorder.active:
        return _NOTHING
    words = f"kind={kind} num_bytes={num_bytes} ranks={','.join(map(str, ranks))}"
    words = f"collective {words} group={_recorder.group_names.get(name, 'world')} async=1"
    words = "modelled" if hasattr(_recorder.inside, "call") else words
    return torch.profiler.record_function(f"stepsight::{words} seconds={seconds:.9f}")


def install() -> None:
    """Wrap the c10d calls; safe to call more than once."""
    if _recorder.installed:
        return
    _recorder.installed = True
    for name, how in WRAPPED.items():
        if original := getattr(c10d, name, None):  # newer or older PyTorch may not have it
            wrapper = _wrap(original, *how)
            for module in filter(lambda each: hasattr(each, name), (c10d, dist)):
                setattr(module, name, wrapper)
    wait = dist.Work.wait

    @wraps(wait)
    def annotated_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waiting(self):
            return wait(self, *args, **kwargs)

    dist.Work.wait = annotated_wait  # type: ignore[method-assign]


def _wrap(original: Callable[..., Any], kind: str, tensor: str, direction: str) -> Callable[..., Any]:
    names = tuple(inspect.signature(original).parameters)

    @wraps(original)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        if not _recorder.active or hasattr(_recorder.inside, "call"):
            return original(*args, **kwargs)
        called = {**dict(zip(names, args, strict=False)), **kwargs}
        group: dist.ProcessGroup = called.get("group") or c10d._get_default_group()
        num_bytes = called[tensor].numel() * called[tensor].element_size()
        members = dist.get_process_group_ranks(group)
        if direction:  # the sender and the receiver take part
            end = "dst" if direction == "send" else "src"
            peer = called.get(end)
            members = [dist.get_rank(), members[called[f"group_{end}"]] if peer is None else peer]
        ranks = ",".join(map(str, members if direction != "recv" else members[::-1]))
        name = _recorder.group_names.get(group.group_name, "world")
        seq, is_async = _recorder.sequence[name], int(bool(direction or called.get("async_op")))
        _recorder.sequence[name] += 1
        words = f"kind={kind} num_bytes={num_bytes} ranks={ranks} group={name} seq={seq} async={is_async}"
        words += f" direction={direction}" if direction else ""
        _recorder.inside.call = kind
        try:
            with torch.profiler.record_function(f"stepsight::collective {words}"):
                work = original(*args, **kwargs)
        finally:
            del _recorder.inside.call
        if work is not None and is_async:
            _recorder.pending[id(work)] = (work, f"stepsight::wait seq={seq} group={name}")
        return work

    return annotated
