"""Caches are bounded, shared by threads, and emptied in one call."""

from __future__ import annotations

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest

from stepsight.dataset.base import caching as compiling
from stepsight.dataset.base.caching import Memo, cached, clear_caches, compiled
from tests.cache_entries import cache_entries

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


def test_a_loop_is_interpreted_until_all_together_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes 40 ms here: the fourth call of any loop is the first that is compiled."""
    now, calls = [0.0], []
    monkeypatch.setattr(compiling.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(compiled, "spent_s", 0.0)

    def slow(which: int) -> None:
        calls.append(which)
        now[0] += 0.04

    loops = [compiled(slow), compiled(slow)]
    monkeypatch.setattr(compiled, "_kept", True)
    for at, loop in enumerate(loops):
        monkeypatch.setattr(loop, "compile", lambda at=at, **_: lambda which: calls.append(10 * at + which))
    for which in (1, 2, 3, 4, 5):
        loops[0](which)
    loops[1](6)
    assert calls == [1, 2, 3, 4, 5, 16]
    assert compiled.spent_s == pytest.approx(0.12)


def test_compiles_without_a_place_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a read-only installation of a user without a home."""
    njit = numba.njit

    def nowhere(*args: object, **options: object) -> object:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", nowhere)

    def double(x: np.ndarray) -> None:
        x *= 2

    x = np.ones(2)
    compiled(double).compile()(x)
    assert x.tolist() == [2.0, 2.0]


def test_code_of_an_earlier_version_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept on disk may name modules that the package no longer has."""
    njit = numba.njit

    def stale(*args: object, **options: object) -> object:
        if not options.pop("cache"):
            return njit(*args, **options)

        def load(*_: object) -> object:
            def fail(*_: object) -> None:
                raise ModuleNotFoundError("No module named 'stepsight.simulator.earlier'")

            return fail

        return load

    monkeypatch.setattr(numba, "njit", stale)
    monkeypatch.setattr(compiled, "spent_s", 4.0)

    @compiled
    def double(x: np.ndarray) -> None:
        x *= 2

    x = np.ones(2)
    double(x)
    assert x.tolist() == [2.0, 2.0]
    double(x)
    assert x.tolist() == [4.0, 4.0]


def test_right_after_installing_it_waits_longer_and_says_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No compiled code of a function in a test is on disk."""
    loop = compiled(lambda: None)
    monkeypatch.setattr(loop, "compile", lambda **_: lambda: None)
    monkeypatch.setattr(compiled, "said", False)
    monkeypatch.setattr(compiled, "spent_s", compiling.COLD_PATIENCE_S - 1)
    loop()
    assert not loop.is_compiled and not capsys.readouterr().err
    monkeypatch.setattr(compiled, "spent_s", compiling.COLD_PATIENCE_S + 1)
    loop()
    assert loop.is_compiled and "compiling with numba" in capsys.readouterr().err
