"""Which calls of a script mark the ends of its steps."""

from __future__ import annotations

import os
import threading

from stepsight.dataset.harness.scripts.step_marks import OPTIMIZER, PROFILER, STATED, StepMarks, listening, step

A, B = object(), object()


class Script:
    """What a script does, as marks; notes at which of its marks steps end."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.marked = 0
        self.marks = StepMarks(lambda: self.steps.append(self.marked), self.steps.clear)

    def does(self, *marks: tuple[str, object]) -> None:
        for kind, source in marks:
            self.marked += 1
            self.marks.mark(kind, source)


def test_steps_of_one_optimizer_end_with_it() -> None:
    script = Script()
    script.does(*[(OPTIMIZER, A)] * 5)
    assert script.steps == [2, 3, 4, 5]
    assert (script.marks.kind, script.marks.count) == (OPTIMIZER, 5)


def test_of_two_optimizers_the_last_one_ends_the_step() -> None:
    script = Script()
    script.does(*[(OPTIMIZER, A), (OPTIMIZER, B)] * 4)
    assert script.steps == [4, 6, 8]


def test_an_optimizer_that_steps_once_in_several_of_another_ends_the_step() -> None:
    script = Script()
    script.does(*([(OPTIMIZER, A)] * 3 + [(OPTIMIZER, B)]) * 4)
    assert script.steps == [8, 12, 16]


def test_a_profiler_knows_better_than_optimizers_and_the_user_knows_best() -> None:
    script = Script()
    script.does(*[(OPTIMIZER, A), (PROFILER, None)] * 4)
    assert script.steps == [2, 4, 6, 8]
    script.does(*[(OPTIMIZER, A), (PROFILER, None), (STATED, None)] * 2)
    assert script.steps == [11, 14]
    assert script.marks.kind == STATED


def test_a_profiler_that_falls_silent_is_believed_no_more() -> None:
    """Many scripts profile their first steps alone."""
    script = Script()
    script.does(*[(OPTIMIZER, A), (PROFILER, None)] * 3, *[(OPTIMIZER, A)] * 10)
    assert script.marks.kind == OPTIMIZER
    assert script.steps[-3:] == [14, 15, 16]


def test_other_threads_and_forked_processes_end_no_step() -> None:
    script = Script()
    thread = threading.Thread(target=script.does, args=[(STATED, None)])
    thread.start()
    thread.join()
    child = os.fork()
    if not child:
        script.does((STATED, None))
        os._exit(len(script.steps))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert script.steps == []


def test_step_tells_who_listens_and_nobody_else() -> None:
    script = Script()
    step()
    with listening(script.marks):
        step()
    step()
    assert len(script.steps) == 1
