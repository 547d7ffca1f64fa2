"""The context model: PyTorch Geometric modules and losses.  Knows tensors, not files."""
