"""Names of collectives in libraries and benchmarks, from the records of their kinds."""

from __future__ import annotations

from collections.abc import Mapping

from stepsight.dataset.base.caching import cached
from stepsight.dataset.kinds import COLLECTIVE_KINDS, kinds_version
from stepsight.dataset.kinds.collective_kind import Side

_Version = tuple[int, int]


def nccl_names() -> Mapping[str, tuple[str, Side]]:
    """NCCL's and PyTorch's names of a collective: the kind, and which side of it is the full buffer."""
    return _nccl_names(kinds_version())


@cached(4)
def _nccl_names(version: _Version) -> Mapping[str, tuple[str, Side]]:
    return {name: (kind.name, side) for kind in COLLECTIVE_KINDS.values() for name, side in kind.nccl_names.items()}


def c10d_calls() -> Mapping[str, tuple[str, int]]:
    """c10d calls that a Python wrapper cannot see (DDP's): the kind, and the input that holds the full buffer."""
    return _c10d_calls(kinds_version())


@cached(4)
def _c10d_calls(version: _Version) -> Mapping[str, tuple[str, int]]:
    return {name: (kind.name, index) for kind in COLLECTIVE_KINDS.values() for name, index in kind.c10d_calls.items()}


def benchmark_names() -> Mapping[str, str]:
    """Names in tables of nccl-tests and of other benchmarks: the kind."""
    return _benchmark_names(kinds_version())


@cached(4)
def _benchmark_names(version: _Version) -> Mapping[str, str]:
    return {name: kind.name for kind in COLLECTIVE_KINDS.values() for name in kind.test_names}


def gloo_spans(name: str) -> tuple[str, ...]:
    """Spans of gloo's worker threads that may carry a collective of a kind, or a ``send`` or ``recv``."""
    kind = COLLECTIVE_KINDS.get(name)
    return kind.gloo_spans if kind is not None and kind.gloo_spans else (name,)
