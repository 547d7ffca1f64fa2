"""Number of entries by cache; caches of objects with the same name are added up."""

from __future__ import annotations

from collections import Counter

from stepsight.dataset.base import caching


def cache_entries() -> Counter[str]:
    counts = Counter({name: int(cache.cache_info().currsize) for name, cache in caching._FUNCTIONS.items()})
    with caching._MEMOS_LOCK:
        for memo in caching._MEMOS:
            counts[memo.name] += len(memo)
    return counts
