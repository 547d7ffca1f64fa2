"""What Megatron-Bridge's recipes do with mixtures of experts that its tables of results do not say.

``dataset/presets/megatron_bridge.csv`` has a line for each release in which a recipe of pre-training changed, from
``scripts/performance/configs`` of the tags 0.2.0 to 0.5.0 (Apache-2.0), which the project's performance summary names
as what it ran: the dispatcher (``moe_flex_dispatcher_backend``), overlap of all-to-alls (``moe_a2a_overlap``), CUDA
graphs (``cuda_graph_impl``: ``parts`` of a layer around the dispatch, or the ``whole`` iteration, then with fused
experts) and recomputed modules.  Releases are named by their containers.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from stepsight.dataset.base.caching import cached

DEGREES = ("tp", "pp", "vp", "ep", "micro_batch")
FIRST = "25.11"  # release: before it, runs were with all-to-alls and limited capacity


@dataclass(frozen=True, slots=True)
class Recipe:
    """A line of the table.

    Attributes:
        release: Container in which it appeared.
        model: Beginning of a model's name without marks.
        device: Word of the hardware.
        precisions: ``bf16``, ``cs`` and ``sc`` (8 bits), ``mx`` (MXFP8) or ``nvfp4``.
        degrees: In the order of ``DEGREES``.
        dispatcher: As in ``ParallelSpec``.
        overlap: Whether all-to-alls run beside another micro-batch.
        graphs: ``none``, ``parts`` or ``whole``.
        recompute: Modules.
    """

    release: str
    model: str
    device: str
    precisions: tuple[str, ...]
    degrees: tuple[int, ...]
    dispatcher: str
    overlap: bool
    graphs: str
    recompute: tuple[str, ...]

    def habits(self) -> dict[str, Any]:
        """Fields of a framework's profile that the recipe sets.

        Where graphs hold the router and what precedes the dispatch, and HybridEP sorts on the device, the host does no
        more than launch; so it is where the iteration is one graph.
        """
        free = self.graphs == "whole" or (self.graphs == "parts" and self.dispatcher == "hybridep")
        return {
            "dispatcher": self.dispatcher,
            "overlap_ep": self.overlap,
            "fused_experts": self.graphs == "whole",
            **({"dispatch_calls": 0.0} if free else {}),
            **({"recompute": "selective", "recompute_modules": self.recompute} if self.recompute else {}),
        }


@cached(1)
def recipes() -> tuple[Recipe, ...]:
    """All lines, oldest first."""
    text = resources.files("stepsight.dataset").joinpath("presets/megatron_bridge.csv").read_text("utf-8")
    found = [
        Recipe(
            line["release"],
            line["model"],
            line["device"],
            tuple(line["precisions"].split()),
            tuple([int(line[key]) for key in DEGREES]),
            line["dispatcher"],
            line["overlap"] == "yes",
            line["graphs"],
            tuple(line["recompute"].split()),
        )
        for line in csv.DictReader(text.splitlines())
    ]
    return tuple(sorted(found, key=lambda recipe: recipe.release))


def find_recipe(
    model: str, hardware: str, precision: str, software: str, degrees: Mapping[str, int | None]
) -> Recipe | None:
    """The recipe that a row is a run of: the one whose degrees are the row's, in its release or before.

    Args:
        model: Name without marks.
        hardware, precision, software: As in the row.
        degrees: By ``DEGREES``; None: the row does not say.
    """
    container = re.search(r"\b(\d\d\.\d\d(?:\.\d\d)?)\b", software)
    release, kind = container[1] if container else "", _precision_kind(precision.lower())
    device = re.sub("[^a-z0-9].*", "", hardware.lower())
    alike = [r for r in recipes() if model.startswith(r.model) and device == r.device]
    same = [r for r in alike if kind in r.precisions] or alike
    if not same or release < FIRST:
        return None

    def fit(recipe: Recipe) -> tuple[int, bool]:
        stated = [(degrees.get(key), own) for key, own in zip(DEGREES, recipe.degrees, strict=True)]
        return sum((value or 1) == own for value, own in stated), recipe.release <= release

    best = max(map(fit, same))
    newest_last = [recipe for recipe in same if fit(recipe) == best]
    return newest_last[-1] if best[1] else newest_last[0]


def _precision_kind(text: str) -> str:
    if "nvfp4" in text:
        return "nvfp4"
    if "bf16" in text:
        return "bf16"
    return "mx" if "mx" in text else "cs"
