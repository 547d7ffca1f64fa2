"""Progress, on a terminal and off it."""

from __future__ import annotations

import io

from stepsight.dataset.harness.base.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_one_line_that_updates() -> None:
    stream = _Terminal()
    bar = Progress(4, stream=stream)
    bar.update("first", done=1)
    bar.close("end")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") == 2
    assert " 25% " in stream.getvalue()


def test_log_gets_plain_lines_now_and_then() -> None:
    stream = io.StringIO()
    bar = Progress(4, done=2, stream=stream)
    for _ in range(2):
        bar.update("work", done=1)
    bar.close("end")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("collect  75% ")
    assert lines[1].endswith("end")


def test_quiet_writes_nothing() -> None:
    stream = io.StringIO()
    bar = Progress(1, shown=False, stream=stream)
    bar.update("work", done=1)
    bar.close("end")
    assert stream.getvalue() == ""
