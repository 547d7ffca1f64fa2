"""Traces of any PyTorch job as graphs: read, split into steps, connected by dependencies, and stored."""
