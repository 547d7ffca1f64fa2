"""Compiled regions: what Inductor fuses, read from its own scheduler."""
