"""Models at the level of tensors: what distributes them, computes them and makes programs of them."""
