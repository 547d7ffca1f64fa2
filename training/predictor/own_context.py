"""Context models: what corrects seconds alone by the graph around them, also one of a user's own."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError, StepsightError
from stepsight.dataset.base.files import write_json
from stepsight.dataset.base.registry import Registry, check_takes
from stepsight.features.graph_features import SegmentGraph

Seconds = NDArray[np.float64]
OWN = "own_context.json"  # names a context model that is registered or that a package brings


class Context(Protocol):
    """A context model: called once for each distinct segment.

    Attributes:
        bound: Largest absolute logarithm of seconds in context over seconds alone; infinite if there is no limit.
        name: What it is, for reports.
        form: One of ``gnn.inference.FORMS``, or ``own``.
        strengths: Of the levels of the context network; zero for another model.
    """

    @property
    def bound(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def strengths(self) -> tuple[float, ...]: ...

    def __call__(self, graph: SegmentGraph, alone: Seconds) -> Seconds:
        """Seconds of each node within its segment, from the seconds alone, ``(nodes,)`` each."""
        ...

    def save(self, folder: Path) -> None:
        """Write its files into a predictor's folder."""
        ...


ContextFunction = Callable[[Any, Any], Any]


def _checked(name: str, thing: Any) -> ContextFunction:
    check_takes(f"context model {name}", thing, ("graph", "alone"), PredictorError)
    return thing  # type: ignore[no-any-return]


CONTEXTS: Registry[ContextFunction] = Registry(
    "context model", group="stepsight.contexts", check=_checked, error=PredictorError
)


@dataclass(frozen=True)
class OwnContext:
    """A user's function ``model(graph, alone) -> seconds``.

    A ``torch.nn.Module`` gets the graph as ``HeteroData``, as ``TraceGraphs`` has those of segments, and a tensor of
    seconds, and returns one; any other callable gets a ``SegmentGraph`` and an array.  Nodes are in the order of issue.
    """

    model: ContextFunction  # the function or module
    registered: str = ""  # its name in CONTEXTS; empty if it has none, and so cannot be saved
    bound, form, strengths = math.inf, "own", (0.0, 0.0, 0.0)

    @classmethod
    def of(cls, model: ContextFunction | str) -> OwnContext:
        """Of a function, or of the name of one in ``CONTEXTS``."""
        return cls(CONTEXTS[model], model) if isinstance(model, str) else cls(_checked("", model))

    @property
    def name(self) -> str:
        """What it is, for reports."""
        return f"context model {self.registered or getattr(self.model, '__name__', type(self.model).__name__)}"

    def __call__(self, graph: SegmentGraph, alone: Seconds) -> Seconds:
        """As of every ``Context``.

        Raises:
            PredictorError: If the model fails, or does not give a positive number for each node.
        """
        torch = sys.modules.get("torch")  # without it there is no module
        try:
            if torch is not None and isinstance(self.model, torch.nn.Module):
                with torch.no_grad():
                    seconds = self.model(graph.to_heterodata(alone), torch.from_numpy(alone).float()).numpy()
            else:
                seconds = self.model(graph, alone)
            seconds = np.asarray(seconds, dtype=np.float64)
        except StepsightError:
            raise
        except Exception as error:  # the user's code
            raise PredictorError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        if seconds.shape != alone.shape or not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise PredictorError(
                f"{self.name} must give {len(alone)} numbers of seconds that are not negative, got {seconds!r:.80}"
            )
        return seconds

    def save(self, folder: Path) -> None:
        """Write its name into a predictor's folder.

        Raises:
            PredictorError: If it has none.
        """
        if not self.registered:
            raise PredictorError(
                f"{self.name} must have a name in stepsight.registries.CONTEXTS to be saved: register it, "
                "then with_context(NAME)"
            )
        write_json(folder / OWN, {"name": self.registered})
