"""Measurements: the nouns, the harness, readers of traces and tables, the store, graphs for learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs

__all__ = ["TraceGraphs"]


def __getattr__(name: str) -> Any:
    """Import PyTorch Geometric only if the graph dataset is used."""
    if name == "TraceGraphs":
        from stepsight.dataset.trace_graphs.trace_graphs import TraceGraphs

        return TraceGraphs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
