"""Loops are interpreted at first, and compiled once they took long."""

import numba
import numpy as np
import pytest

from stepsight.dataset.base import compiling
from stepsight.dataset.base.compiling import compiled


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
