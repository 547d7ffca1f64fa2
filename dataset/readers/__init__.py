"""Readers of traces, one small file per format."""
