"""Hypothesis has no deadline in any test: what takes the machine's time is not the code alone."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
