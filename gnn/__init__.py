"""The context model: PyTorch Geometric modules and losses. Works on tensors only and reads no files."""
