"""Annotates the calls of functions that ``torch.compile`` makes for a CPU, so that traces tell what they do.

A call of a compiled function is an op ``fused_loops`` with the amounts that its code does.  Nothing is read again: the
code is what Inductor compiles anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import annotate
from ..patching import patch

FUSED = "fused_loops"


def install() -> None:
    """Annotate what ``torch.compile`` makes from now on; other backends, modes and options stay as they are."""
    plain = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda given: compiled(given, **options)
        others = {name for name, value in options.items() if value not in (None, False)} - {"fullgraph", "dynamic"}
        if others - {"backend"} or options.get("backend", "inductor") != "inductor":
            return plain(model, **options)
        kept = {name: options[name] for name in ("fullgraph", "dynamic") if name in options}
        return plain(model, backend=_backend(), **kept)

    patch(torch, compile=compiled)


def _backend() -> Callable[..., Any]:
    from ..regions.inductor import compiling_backend

    torch._inductor.config.fx_graph_cache = False  # else the code of a graph that was compiled before is not told
    torch._functorch.config.enable_autograd_cache = False
    return compiling_backend(_annotate)


def _annotate(region: Any, made: Any) -> None:
    """Wrap the compiled functions of a region."""
    from ..regions.loop_code import region_dims

    call = getattr(made, "current_callable", None)
    space = getattr(call, "__globals__", None) or getattr(getattr(call, "__func__", None), "__globals__", {})
    told: dict[str, list[tuple[int, ...]]] = {}
    for launch, dims in zip(region.launches, region_dims(region), strict=True):
        told.setdefault(launch.call, []).append(dims)
    for name, calls in told.items():
        if callable(space.get(name)):
            space[name] = _Annotated(space[name], calls)


class _Annotated:
    """A compiled function.

    Args:
        kernel: The function.
        dims: Of its calls in a run of the region, in order.
    """

    def __init__(self, kernel: Callable[..., Any], dims: Sequence[tuple[int, ...]]) -> None:
        self._kernel, self._dims, self._turn = kernel, dims, 0

    def __call__(self, *arguments: Any) -> Any:
        dims = self._dims[self._turn % len(self._dims)]
        self._turn += 1
        with annotate.op(FUSED, dims, torch.float32):
            return self._kernel(*arguments)
