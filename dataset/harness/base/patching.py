"""Replacing functions of torch by those of the fake world, for the lifetime of the process."""

from __future__ import annotations

from typing import Any


def patch(owner: Any, **values: Any) -> None:
    """Set attributes of a module or class of torch."""
    for name, value in values.items():
        setattr(owner, name, value)
