"""The error of the harness for mistakes that the user can correct."""

from __future__ import annotations


class HarnessError(ValueError):
    """A plan that cannot be collected here; the message states the rule and the values."""
