"""Replay of traces: measured steps from durations and dependencies."""
