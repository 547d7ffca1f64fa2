"""Traces replayed: measured steps from durations and dependencies alone."""
