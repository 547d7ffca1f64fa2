"""Caches are bounded, shared by threads, and emptied in one call."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stepsight.dataset.base.caching import Memo, cache_entries, cached, clear_caches

CALLS: list[int] = []


@cached(4)
def double(x: int) -> int:
    """Twice a number."""
    CALLS.append(x)
    return 2 * x


NAME = f"{__name__}.double"


def test_one_call_empties_all_caches() -> None:
    CALLS.clear()
    memo: Memo[str, int] = Memo("test", 8)
    memo["a"] = 1
    assert double(3) == double(3) == 6 and CALLS == [3]
    assert cache_entries()[NAME] == 1 and cache_entries()["test"] == 1
    clear_caches()
    assert cache_entries()[NAME] == 0 and not memo
    assert double(3) == 6 and CALLS == [3, 3]


def test_caches_are_bounded() -> None:
    for x in range(100):
        double(x)
    assert cache_entries()[NAME] == 4
    memo: Memo[int, int] = Memo("bounded", 10)
    memo.update((x, x) for x in range(101))
    assert len(memo) <= 10 and memo.get(100) == 100
    memo[100] = 0
    assert memo.get(100) == 0


def test_an_objects_memo_goes_with_it() -> None:
    memo: Memo[int, int] = Memo("passing", 10)
    memo[1] = 1
    assert cache_entries()["passing"] == 1
    del memo
    assert "passing" not in cache_entries()


def test_a_copy_of_a_memo_begins_empty() -> None:
    memo: Memo[int, int] = Memo("copied", 10)
    memo[1] = 1
    other = copy.deepcopy(memo)
    assert not other and other.maxsize == 10 and other != memo


def test_threads_share_a_memo() -> None:
    memo: Memo[int, int] = Memo("shared", 16)

    def work(start: int) -> bool:
        for x in range(start, start + 2000):
            known = memo.get(x % 40)
            if known is None:
                memo[x % 40] = known = x % 40
            if known != x % 40:
                return False
            if x % 97 == 0:
                clear_caches()
        return len(memo) <= 16

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_every_cache_can_be_emptied() -> None:
    """Caches of functions are ``cached``; the harness, which may not import it, bounds its own."""
    root = Path(__file__).parents[3]
    for room in ("dataset", "features", "gnn", "simulator", "training", "experiments", "stepsight"):
        for path in (root / room).rglob("*.py"):
            text = path.read_text("utf-8")
            if path.name == "caching.py" or "harness" in path.parts:
                assert not re.search(r"functools import .*\bcache\b|functools\.cache\b|maxsize=None", text), path
            else:
                assert not re.search(r"functools import .*(lru_cache|\bcache\b)|functools\.(lru_)?cache\b", text), path
