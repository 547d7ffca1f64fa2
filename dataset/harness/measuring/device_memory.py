"""Memory of this rank's device: free what is left over, and recognise that it ran out."""

from __future__ import annotations

import gc

import torch


def free_memory() -> None:
    """Free unreferenced objects, including models in reference cycles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, also in a library's own words."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )
