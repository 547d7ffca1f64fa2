"""Traces of any PyTorch job as graphs: read, cut into steps, tied together by dependencies, and stored."""
