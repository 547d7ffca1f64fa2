"""Durations of collectives in an emulated world: from latency and bandwidth, a predictor, or a user's file."""

from __future__ import annotations

import json
import math
import os
import runpy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepsight.dataset.base.errors import CollectError, StepsightError
from stepsight.dataset.hardware.fabric import Fabric
from stepsight.dataset.hardware.physics import alpha_beta_seconds
from stepsight.dataset.kinds import COLLECTIVE_KINDS
from stepsight.dataset.kinds.op import Collective
from stepsight.training.predictor.predictor import Predictor

Delay = Callable[[Collective], float]
FUNCTION = "seconds"  # of a user's file
_MOST_S = 3600.0


@dataclass(frozen=True)
class Extra:
    """An additional delay of collectives that match.

    Attributes:
        what: ``all``, a kind, ``group`` (of ``number`` ranks) or ``bytes`` (at least ``number``).
        number: See ``what``.
        seconds: On top.
    """

    what: str
    number: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Extra:
        """``all_reduce=5``, ``group:256=5``, ``bytes:1000000=5`` or ``all=5``, in milliseconds.

        Raises:
            CollectError: If it is none of these.
        """
        name, _, milliseconds = text.rpartition("=")
        what, _, number = name.partition(":")
        wrong = CollectError(
            f"--extra-ms takes WHAT=MS, where WHAT is all, group:RANKS, bytes:AT_LEAST or one of "
            f"{', '.join(COLLECTIVE_KINDS.names())}, got {text!r:.80}"
        )
        try:
            found = cls(what, int(number) if number else 0, float(milliseconds) * 1e-3)
        except ValueError:
            raise wrong from None
        numbered = what in ("group", "bytes")
        if numbered != bool(number) or not (numbered or what == "all" or what in COLLECTIVE_KINDS):
            raise wrong
        if not 0 <= found.seconds <= _MOST_S:
            raise CollectError(f"--extra-ms takes 0 to {1e3 * _MOST_S:g} ms, got {text!r:.80}")
        return found

    def of(self, collective: Collective) -> float:
        """Additional seconds of a collective."""
        if self.what == "group":
            matches = collective.group_size == self.number
        elif self.what == "bytes":
            matches = collective.num_bytes >= self.number
        else:
            matches = self.what in ("all", collective.kind)
        return self.seconds if matches else 0.0


def delays_of(source: str, fabric: Fabric | None, predictor: Predictor | None, extra: Sequence[Extra]) -> Delay:
    """Seconds of collectives from ``alpha-beta``, ``predictor`` or a Python file, plus additional delays.

    Raises:
        CollectError: If the source lacks what it needs.
    """
    base = _base(source, fabric, predictor)

    def delay(collective: Collective) -> float:
        seconds = float(base(collective))
        if not (math.isfinite(seconds) and 0 <= seconds <= _MOST_S):
            raise CollectError(f"delays must be 0 to {_MOST_S:g} seconds, got {seconds} for {collective}")
        return seconds + sum(each.of(collective) for each in extra)

    return delay


def _base(source: str, fabric: Fabric | None, predictor: Predictor | None) -> Delay:
    if source.endswith(".py"):
        return _from_file(Path(source))
    if source not in ("alpha-beta", "predictor"):
        raise CollectError(f"--delays must be alpha-beta, predictor or a Python file (.py), got {source!r:.80}")
    if fabric is None:
        raise CollectError(f"--delays {source} needs --fabric: a name or a file")
    if source == "alpha-beta":
        return lambda collective: alpha_beta_seconds(collective, fabric)
    if predictor is None:
        raise CollectError("--delays predictor needs --predictor: a folder, or a name as a100-sxm")
    learned = predictor.collective
    return lambda collective: float(learned.seconds([collective], fabric)[0])


def _from_file(path: Path) -> Delay:
    """Run a file, and return its function ``seconds(kind, num_bytes, group_size, ranks_per_node)``."""
    if not path.is_file():
        raise CollectError(f"--delays must be alpha-beta, predictor or an existing Python file, got no file {path}")
    try:
        found = runpy.run_path(str(path)).get(FUNCTION)
    except Exception as error:
        raise CollectError(f"--delays {path} raised {type(error).__name__}: {error}") from None
    if not callable(found):
        raise CollectError(f"--delays {path} must define {FUNCTION}(kind, num_bytes, group_size, ranks_per_node)")
    function: Callable[..., float] = found

    def delay(c: Collective) -> float:
        try:
            return float(function(c.kind, c.num_bytes, c.group_size, c.ranks_per_node))
        except Exception as error:
            raise CollectError(f"{FUNCTION} of {path} raised {type(error).__name__}: {error} for {c}") from None

    return delay


@contextmanager
def telling(delay: Delay) -> Iterator[tuple[int, int]]:
    """Answer one process' requests for delays until the block ends; yield its ends of both pipes.

    A question is a line of JSON: kind, bytes, group size and ranks per node.
    """
    asked, questions = os.pipe()
    answers, told = os.pipe()
    threading.Thread(target=_answer, args=(asked, told, delay), daemon=True).start()
    try:
        yield questions, answers
    finally:
        os.close(questions)
        os.close(answers)


def _answer(asked: int, told: int, delay: Delay) -> None:
    with os.fdopen(asked, encoding="utf-8") as questions, os.fdopen(told, "w", encoding="utf-8") as answers:
        for line in questions:
            try:
                answer: object = delay(Collective(*json.loads(line)))
            except (StepsightError, ValueError, TypeError) as error:
                answer = {"error": str(error)}
            try:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
            except OSError:
                return
