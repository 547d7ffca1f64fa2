"""The one error of the harness that a user can put right."""

from __future__ import annotations


class HarnessError(ValueError):
    """A plan that cannot be collected here; the message states the rule and the values."""
