"""Errors of scripts are error_text with the script's own line."""

from __future__ import annotations

import runpy
import threading
import time
from pathlib import Path

import pytest

from stepsight.dataset.harness.base.errors import error_text, line_of_thread


def _error(path: Path, text: str) -> BaseException:
    path.write_text(text)
    try:
        runpy.run_path(str(path))
    except Exception as error:
        return error
    raise AssertionError("the script must fail")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import json\n\njson.loads('{')\n", "JSONDecodeError: .* at train.py:3: json.loads"),
        ("def f():\n    return 1 / 0\n\nf()\n", "ZeroDivisionError: division by zero at train.py:2: return 1 / 0"),
        ("x = (\n", "SyntaxError: .* at train.py:1: x = \\("),
        ("raise AssertionError('Torch not compiled with CUDA enabled')\n", "asks for CUDA .* at train.py:1: .*the CPU"),
        ('raise RuntimeError("Distributed package doesn\'t have NCCL built in")\n', "asks for CUDA .* train.py:1"),
    ],
)
def test_an_error_is_told_with_the_line_of_the_script(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.py"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error_text(_error(path, text), path))


def test_a_thread_is_told_by_the_line_at_which_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import threading\nenter.set()\nleave.wait()\n")
    enter, leave = threading.Event(), threading.Event()
    events = {"enter": enter, "leave": leave}
    thread = threading.Thread(target=lambda: runpy.run_path(str(path), init_globals=events))
    thread.start()
    enter.wait()
    end = time.monotonic() + 10
    while line_of_thread(thread.ident or 0, path) != "train.py:3: leave.wait()":
        assert time.monotonic() < end
    leave.set()
    thread.join()
