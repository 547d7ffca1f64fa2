"""Errors by family of ops and by kind of collective, and the shapes that a predictor was trained on."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import PredictorError

Array = NDArray[np.float64]
LONG_S = 50e-6  # launches and clocks blur shorter times


def family_figures(names: Sequence[str], predicted: Array, measured: Array) -> dict[str, dict[str, float | int | None]]:
    """Rows, and mean, median and 90th percentile of the absolute error in percent, by name.

    ``mape_over_50us`` is the mean error of what takes 50 microseconds and more; None if nothing does.
    """
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        rows.setdefault(name, []).append(index)
    figures: dict[str, dict[str, float | int | None]] = {}
    for name, members in sorted(rows.items()):
        off = 100 * np.abs(predicted[members] / measured[members] - 1)
        long = off[measured[members] >= LONG_S]
        figures[name] = {
            "rows": len(off),
            "mape": float(off.mean()),
            "median": float(np.median(off)),
            "p90": float(np.quantile(off, 0.9)),
            "mape_over_50us": float(long.mean()) if len(long) else None,
        }
    return figures


def pack_shapes(shapes: Iterable[Hashable]) -> str:
    """Digests of shapes, as text for a manifest."""
    digests = np.array(sorted({_digest(shape) for shape in shapes}), dtype="<u8")
    return base64.b64encode(digests.tobytes()).decode("ascii")


def trained_on(manifest: Mapping[str, Any], shapes: Sequence[Hashable]) -> NDArray[np.bool_]:
    """Which shapes a predictor was trained on, by its manifest, ``(shapes,)``.

    Raises:
        PredictorError: If the manifest's list is damaged.
    """
    packed = manifest.get("trained_shapes", "")
    try:
        known = np.frombuffer(base64.b64decode(packed, validate=True), dtype="<u8")
    except (ValueError, TypeError):
        raise PredictorError(f"trained_shapes of a predictor must be base64 text, got {packed!r:.40}") from None
    return np.isin(np.array([_digest(shape) for shape in shapes], dtype="<u8"), known)


def _digest(shape: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(repr(shape).encode(), digest_size=8).digest(), "little")
