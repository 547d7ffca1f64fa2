"""``stepsight emulate``: run some ranks of a user's script; modelled delays replace all others."""

from __future__ import annotations

import json
import math
import os
import runpy
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError, StepsightError
from stepsight.dataset.hardware.hardware import alpha_beta_seconds
from stepsight.dataset.hardware.hardware_facts import Fabric
from stepsight.dataset.harness.base.plan_error import HarnessError
from stepsight.dataset.harness.scripts.launch import Ranks
from stepsight.dataset.kinds import COLLECTIVE_KINDS
from stepsight.dataset.kinds.op import Collective
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.tasks.script_collecting import run_script, slowest_of
from stepsight.experiments.tasks.settings import Emulation
from stepsight.training.predictor.predictor import Predictor

_SHOWN = 500  # characters of a failed script's output


def emulate(
    script: Path, arguments: Sequence[str], world: Emulation, delay: Delay, *, progress: bool = True
) -> dict[str, Any]:
    """Run ranks of a script in an emulated world.

    Args:
        script: The user's Python file.
        arguments: Its own.
        world: Which ranks run, and how long.
        delay: Seconds of each collective.
        progress: Say on standard error what goes on.

    Returns:
        ``step_seconds`` (of the slowest rank in each step), ``rounds``, ``iteration_s`` (their median),
        ``spread_percent`` over rounds, ``collectives`` of a step of the first rank: kind, bytes, group,
        ``calls_per_step`` and modelled ``seconds`` of each; and ``ranks``, with steps and collectives of each.

    Raises:
        CollectError: If the script cannot be emulated; with its own line.
    """
    if not script.is_file():
        raise CollectError(f"emulate takes a Python file, got no file {script}")
    emulated = {"ranks": list(world.ranks), "devices_per_node": world.devices_per_node, "virtual": world.virtual}
    counts = {"warmup": world.warmup, "rounds": world.rounds, "steps": world.steps, "profile_steps": 0}
    settings = {"arguments": list(arguments), "timeout_s": world.timeout_s, "emulate": emulated, **counts}
    with tempfile.TemporaryDirectory(prefix="stepsight-") as temporary, ExitStack() as open_pipes:
        pipes = {rank: open_pipes.enter_context(answers_of(delay)) for rank in world.ranks}
        ranks, log = Ranks.emulated(pipes, world.world_size, world.devices_per_node), Path(temporary) / "script.log"
        try:
            found = run_script(script, settings, Path(temporary), log, ranks, progress=progress, verb="emulate")
        except HarnessError as error:
            output = log.read_text("utf-8", errors="replace")[-_SHOWN:].strip() if log.exists() else ""
            output = " | ".join(output.splitlines())  # errors are one line
            told = str(error).removesuffix(f"; see {log}")
            raise CollectError(told + (f"; the end of its output: {output}" if output else "")) from None
    return _summary(script, world, found)


def _summary(script: Path, world: Emulation, found: list[dict[str, Any]]) -> dict[str, Any]:
    rounds = slowest_of(found)
    seconds = [each for steps in rounds for each in steps]
    medians, whole = [statistics.median(steps) for steps in rounds], statistics.median(seconds)
    ranks = [
        {
            "rank": rank,
            "step_seconds": [each for steps in each_rank["rounds"] for each in steps],
            "collectives": [_per_step(each, len(seconds)) for each in each_rank["collectives"]],
        }
        for rank, each_rank in zip(world.ranks, found, strict=True)
    ]
    told = {
        "script": str(script),
        "world_size": world.world_size,
        "ranks": ranks,
        "clock": "virtual" if world.virtual else "real",
        "steps_by": found[0]["steps_by"],
        "iteration_s": whole,
        "spread_percent": 100 * (max(medians) - min(medians)) / whole if whole else 0.0,
        "rounds": rounds,
        "step_seconds": seconds,
        "collectives": ranks[0]["collectives"],
    }
    return {**told, "text": _text(told)}


def _per_step(collective: dict[str, Any], steps: int) -> dict[str, Any]:
    told = {name: value for name, value in collective.items() if name != "calls"}
    return {**told, "calls_per_step": collective["calls"] / steps}


def _text(told: dict[str, Any]) -> str:
    names = ("kind", "num_bytes", "group_size", "ranks_per_node")
    cells = [
        [*(each[name] for name in names), Number(each["calls_per_step"]), Number(1e3 * each["seconds"], 3),
         Number(1e3 * each["seconds"] * each["calls_per_step"], 3)]
        for each in told["collectives"]
    ]  # fmt: skip
    titles = ["collective", "bytes", "ranks", "per node", "calls per step", "ms each", "ms per step"]
    ranks = ", ".join(str(each["rank"]) for each in told["ranks"])
    return (
        f"rank {ranks} of {told['world_size']}, {told['clock']} clock, steps by {told['steps_by']}\n"
        f"iteration {1e3 * told['iteration_s']:.2f} ms, spread {told['spread_percent']:.1f} % over rounds\n"
        + (table(titles, cells) if cells else "no collectives")
    )


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


_ASKED = threading.Lock()  # ranks send their questions from their own threads


@contextmanager
def answers_of(delay: Delay) -> Iterator[tuple[int, int]]:
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
                with _ASKED:
                    answer: object = delay(Collective(*json.loads(line)))
            except (StepsightError, ValueError, TypeError) as error:
                answer = {"error": str(error)}
            try:
                answers.write(json.dumps(answer) + "\n")
                answers.flush()
            except OSError:
                return
