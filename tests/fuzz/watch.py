"""What every input must keep: an answer that is a number one can use, or one short line that says what is wrong."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepsight.dataset.base.errors import StepsightError

HANG_S = 20  # of computing: machines that are busy with other work are slower
WAIT_S = 200  # of anything: a machine may be that busy, an input that blocks is not done then
MOST_CHARACTERS = 1500  # of an error
MOST_ECHO = 200  # characters of one value that an error repeats


class Hang(BaseException):
    """An input that takes more than ``HANG_S``."""


@contextmanager
def bounded_time() -> Iterator[None]:
    """Raise ``Hang`` in the main thread when the time is over."""

    def ring(*_: object) -> None:
        raise Hang(f"took more than {HANG_S} s of a core, or {WAIT_S} s")

    clocks = {signal.ITIMER_REAL: (signal.SIGALRM, WAIT_S), signal.ITIMER_PROF: (signal.SIGPROF, HANG_S)}
    before = {number: signal.signal(number, ring) for number, _ in clocks.values()}
    for clock, (_, seconds) in clocks.items():
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def answered(ask: Callable[[], None]) -> bool:
    """Whether an input was answered; False: it was refused as it should be.

    Raises:
        AssertionError: If it was refused in too many words.
        Exception: Any other that is no refusal.
    """
    try:
        with bounded_time():
            ask()
    except (StepsightError, OSError) as error:  # the command line prints both as one line
        text = str(error)
        assert text.strip(), "an error must say something"
        assert len(text) <= MOST_CHARACTERS, f"an error of {len(text)} characters: {text[:300]}"
        assert "x" * MOST_ECHO not in text and "0" * MOST_ECHO not in text, f"a value is not shortened: {text[:300]}"
        return False
    return True


def check_numbers(value: Any, where: str = "answer") -> None:
    """No number of an answer is NaN, infinite or absurd.

    Raises:
        AssertionError: If one is.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_numbers(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_numbers(item, f"{where}[{index}]")
    elif isinstance(value, float):
        assert math.isfinite(value), f"{where} = {value}"
        assert abs(value) <= 1e40, f"{where} = {value}"
