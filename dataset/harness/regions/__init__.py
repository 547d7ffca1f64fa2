"""Compiled regions: the kernels that Inductor fuses, read from its scheduler."""
