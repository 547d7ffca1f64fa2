"""Memory of this rank: free what is left over, give it back to the system, and recognise that it ran out."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import lru_cache

import torch


def free_memory() -> None:
    """Free unreferenced objects, including models in reference cycles."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def give_back_memory() -> None:
    """Return the host's free memory to the system, where the C library can (glibc)."""
    _trim()(0)


@lru_cache(1)
def _trim() -> Callable[[int], object]:
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found if found is not None else abs


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, also in a library's own words."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )
