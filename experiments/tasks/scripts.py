"""What is done with a training script of the user: it is collected, or some ranks of it run in an emulated world."""

from __future__ import annotations

import json
import os
import runpy
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError, StepsightError
from stepsight.dataset.base.files import check_writable, digest, new_folder, read_json, write_json
from stepsight.dataset.hardware.hardware import alpha_beta_seconds
from stepsight.dataset.hardware.hardware_facts import Fabric
from stepsight.dataset.harness.base.atomic_files import locked
from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.plan.plan_checks import SCHEMA, check_plan
from stepsight.dataset.harness.running.progress import Progress
from stepsight.dataset.harness.scripts.launch import Ranks, run_ranks
from stepsight.dataset.kinds import COLLECTIVE_KINDS
from stepsight.dataset.kinds.op import OPAQUE, Collective
from stepsight.dataset.runs.run_folder import read_imported, write_imported
from stepsight.dataset.traces.import_traces import Imported, import_ranks
from stepsight.experiments.reports.run_texts import describe_collection, step_times
from stepsight.experiments.reports.text_table import Number, table_of
from stepsight.experiments.tasks.collecting import available_ranks, run_plan
from stepsight.experiments.tasks.settings import Emulation
from stepsight.training.predictor.predictor import Predictor

_SHOWN = 500  # characters of a failed script's output


def emulate(
    script: Path, arguments: Sequence[str], world: Emulation, delay: Delay, *, progress: bool = True
) -> dict[str, Any]:
    """Run ranks of a script in an emulated world: seconds of each step on the slowest rank, their median, its spread
    over rounds, and the collectives of a step of each rank, with their modelled seconds.
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
            found = run_script(script, settings, Path(temporary), log, ranks, "emulate" if progress else "")
        except HarnessError as error:
            output = log.read_text("utf-8", errors="replace")[-_SHOWN:].strip() if log.exists() else ""
            output = " | ".join(output.splitlines())  # errors are one line
            words = str(error).removesuffix(f"; see {log}")
            raise CollectError(words + (f"; the end of its output: {output}" if output else "")) from None
    rounds = slowest_of(found)
    seconds = [each for steps in rounds for each in steps]
    times = step_times(rounds)
    measured = list[dict[str, Any]]()
    for rank, own in zip(world.ranks, found, strict=True):
        collectives = [
            {**{key: of for key, of in row.items() if key != "calls"}, "calls_per_step": row["calls"] / len(seconds)}
            for row in own["collectives"]
        ]
        measured.append({"rank": rank, "step_seconds": list(chain(*own["rounds"])), "collectives": collectives})
    told: dict[str, Any] = {
        "script": str(script),
        "world_size": world.world_size,
        "ranks": measured,
        "clock": "virtual" if world.virtual else "real",
        "steps_by": found[0]["steps_by"],
        "iteration_s": times["measured_s"],
        "spread_percent": times["spread_percent"],
        "rounds": rounds,
        "step_seconds": seconds,
        "collectives": measured[0]["collectives"],
    }
    columns: dict[str, str | Callable[[Any], object]] = {
        "collective": "kind", "bytes": "num_bytes", "ranks": "group_size", "per node": "ranks_per_node",
        "calls per step": lambda each: Number(each["calls_per_step"]), "each ms": "seconds",
        "of a step ms": lambda each: each["seconds"] * each["calls_per_step"],
    }  # fmt: skip
    numbers = ", ".join(map(str, world.ranks))
    text = (
        f"rank {numbers} of {world.world_size}, {told['clock']} clock, steps by {told['steps_by']}\n"
        f"iteration {1e3 * told['iteration_s']:.2f} ms, spread {told['spread_percent']:.1f} % over rounds\n"
        + (table_of(told["collectives"], columns, 3) if told["collectives"] else "no collectives")
    )
    return {**told, "text": text}


Delay = Callable[[Collective], float]
FUNCTION = "seconds"  # of a user's file
_MOST_S = 3600.0


def extra_delay(text: str) -> Delay:
    """Additional seconds of collectives that match: ``all_reduce=5``, ``group:256=5`` (ranks), ``bytes:1000000=5`` (at
    least) or ``all=5``, in milliseconds.
    """
    name, _, milliseconds = text.rpartition("=")
    what, _, number = name.partition(":")
    try:
        numbered, least, seconds = what in ("group", "bytes"), int(number or 0), float(milliseconds) * 1e-3
        if numbered != bool(number) or not (numbered or what == "all" or what in COLLECTIVE_KINDS):
            raise ValueError
    except ValueError:
        what = f"all, group:RANKS, bytes:AT_LEAST or one of {', '.join(COLLECTIVE_KINDS.names())}"
        raise CollectError(f"--extra-ms takes WHAT=MS, where WHAT is {what}, got {text!r:.80}") from None
    if not 0 <= seconds <= _MOST_S:
        raise CollectError(f"--extra-ms takes 0 to {1e3 * _MOST_S:g} ms, got {text!r:.80}")

    def delay(collective: Collective) -> float:
        matches = {"group": collective.group_size == least, "bytes": collective.num_bytes >= least}
        return seconds if matches.get(what, what in ("all", collective.kind)) else 0.0

    return delay


def delays_of(source: str, fabric: Fabric | None, predictor: Predictor | None, extra: Sequence[Delay]) -> Delay:
    """Seconds of collectives from ``alpha-beta``, ``predictor`` or a Python file, plus additional delays."""
    if source.endswith(".py"):
        base = _from_file(Path(source))
    elif source not in ("alpha-beta", "predictor"):
        raise CollectError(f"--delays must be alpha-beta, predictor or a Python file (.py), got {source!r:.80}")
    elif fabric is None:
        raise CollectError(f"--delays {source} needs --fabric: a name or a file")
    elif source == "alpha-beta":
        base = partial(alpha_beta_seconds, fabric=fabric)
    elif predictor is None:
        raise CollectError("--delays predictor needs --predictor: a folder, or a name as a100-sxm")
    else:
        base = lambda collective: predictor.collective.seconds([collective], fabric)[0]

    def delay(collective: Collective) -> float:
        seconds = float(base(collective))
        if not 0 <= seconds <= _MOST_S:
            raise CollectError(f"delays must be 0 to {_MOST_S:g} seconds, got {seconds} for {collective}")
        return seconds + sum(each(collective) for each in extra)

    return delay


def _from_file(path: Path) -> Delay:
    """Run a file, and return its function ``seconds(kind, num_bytes, group_size, ranks_per_node)``."""
    if not path.is_file():
        raise CollectError(f"--delays must be alpha-beta, predictor or an existing Python file, got no file {path}")
    try:
        function = runpy.run_path(str(path)).get(FUNCTION)
    except Exception as error:
        raise CollectError(f"--delays {path} raised {type(error).__name__}: {error}") from None
    if not callable(function):
        raise CollectError(f"--delays {path} must define {FUNCTION}(kind, num_bytes, group_size, ranks_per_node)")

    def delay(c: Collective) -> float:
        try:
            return float(function(c.kind, c.num_bytes, c.group_size, c.ranks_per_node))
        except Exception as error:
            raise CollectError(f"{FUNCTION} of {path} raised {type(error).__name__}: {error} for {c}") from None

    return delay


_ASKED = threading.Lock()  # ranks send their questions from their own threads


@contextmanager
def answers_of(delay: Delay) -> Iterator[tuple[int, int]]:
    """Answer one process' requests for delays, lines of JSON with kind, bytes, group size and ranks per node, until the
    block ends; yield its ends of both pipes.
    """
    asked, questions = os.pipe()
    answers, told = os.pipe()

    def answer() -> None:
        with os.fdopen(asked, encoding="utf-8") as lines, suppress(OSError), os.fdopen(told, "w") as file:
            for line in lines:
                try:
                    with _ASKED:
                        found: object = delay(Collective(*json.loads(line)))
                except (StepsightError, ValueError, TypeError) as error:
                    found = {"error": str(error)}
                file.write(json.dumps(found) + "\n")
                file.flush()

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield questions, answers
    finally:
        os.close(questions)
        os.close(answers)


TRACED = "traced"  # folder in a collection: files that the script wrote
FACTS = "script.json"


@dataclass(frozen=True)
class Script:
    """A script and its measurement settings."""

    path: Path  # the file
    arguments: Sequence[str]  # its own
    ranks: int | None  # none: one process that knows of no ranks
    counts: dict[str, int]  # ``warmup``, ``rounds``, ``steps`` and ``profile_steps``
    timeout_s: float  # within which all its measured steps must be through
    role: str  # what the run is for

    @property
    def facts(self) -> dict[str, Any]:
        """Identity of the script."""
        told = {"script": str(self.path.resolve()), "arguments": list(self.arguments), "ranks": self.ranks or 1}
        return {**told, "sha256": digest(self.path.read_bytes()), "role": self.role, **self.counts}

    @property
    def name(self) -> str:
        """Identity of its run: the same for the same script, arguments and ranks."""
        return f"{self.path.stem}-r{self.ranks or 1}-{digest(*map(str, self.facts.values()))[:8]}"


def ranks_of(text: str | None) -> int | None:
    """Ranks that ``--nproc-per-node`` asks for."""
    if text is None:
        return None
    if text in ("auto", "cpu", "gpu"):
        return available_ranks()
    if not text.isdecimal() or int(text) < 1:
        raise CollectError(f"--nproc-per-node must be a whole number >= 1 or auto, got {text!r:.80}")
    return int(text)


def collect_script(script: Script, out: Path, event_seconds: float) -> dict[str, Any]:
    """Run a script, trace it, import the traces, and measure its distinct ops and collectives. A killed collection
    resumes: with the script, with the import, or where the measurements stopped.
    """
    _check(script, out)
    out.mkdir(parents=True, exist_ok=True)
    folder = out / TRACED / script.name
    with locked(out / ".lock") as ours:
        if not ours:
            raise CollectError(f"another collection is writing to {out}: wait for its end, or choose another folder")
        if not (folder / FACTS).exists():
            ranks = Ranks.here(script.ranks)
            settings = {"arguments": list(script.arguments), "timeout_s": script.timeout_s, **script.counts}
            log = out / "logs" / "script.log"
            try:
                with new_folder(folder) as part:  # it is written completely or not at all
                    measured = run_script(script.path, settings, part, log, ranks, "collect")
                    profiled = [max(column) for column in zip(*(r["profiled_seconds"] for r in measured), strict=True)]
                    told = {name: measured[0][name] for name in ("steps_by", "device", "threads")}
                    told |= {"rounds": slowest_of(measured), "profiled_seconds": profiled}
                    told["traces"] = {str(r["rank"]): r["traces"] for r in measured}
                    told["digests"] = {name: value for r in measured for name, value in r["digests"].items()}
                    memory = [r["peak_memory_bytes"] for r in measured if r["peak_memory_bytes"] is not None]
                    write_json(part / FACTS, {**script.facts, **told, "peak_memory_bytes": memory})
            except HarnessError as error:
                raise CollectError(str(error)) from None
        facts = read_json(folder / FACTS)
        if not (out / "plan.json").exists():
            files = [files for _, files in sorted(facts["traces"].items(), key=lambda item: int(item[0]))]
            kineto, et = ([folder / each[form] for each in files] for form in ("kineto", "et"))
            found = import_ranks(kineto, et)
            plan = _event_plan(found, event_seconds)
            more = {name: facts[name] for name in ("role", "rounds", "profiled_seconds", "script", "arguments")}
            write_imported(found.graphs, found.sources, out, None, found.warnings, name=script.name, more=more)
            write_json(out / "plan.json", plan)
    summary = run_plan(read_json(out / "plan.json"), out)
    seconds = [each for steps in facts["rounds"] for each in steps]
    warnings = list(read_imported(out / "runs" / script.name).warnings)
    own = {"run": script.name, "steps_by": facts["steps_by"], "step_seconds": seconds, "warnings": warnings}
    text = "\n".join([describe_collection(out)["text"], *(f"warning: {each}" for each in warnings)])
    return {**summary, **own, "runs": 1, "text": text}


def _check(script: Script, out: Path) -> None:
    if not script.path.is_file():
        raise CollectError(f"--script takes a Python file, got no file {script.path}")
    if script.ranks is not None and script.ranks > available_ranks():
        most = f"--nproc-per-node <= {available_ranks()} here"
        raise CollectError(f"every rank needs a core (or GPU) of its own: {most}, got {script.ranks}")
    check_writable(out)
    others = [path.name for path in (out / TRACED).glob("[!.]*") if path.name != script.name]
    if others or ((out / "plan.json").exists() and not (out / TRACED / script.name).exists()):
        rule = f"a folder holds one script with its arguments, or one plan: {out} was begun with another"
        raise CollectError(f"{rule}; choose another folder (and name both when you train)")


def run_script(
    path: Path, settings: dict[str, Any], folder: Path, log: Path, ranks: Ranks, verb: str
) -> list[dict[str, Any]]:
    """Run a script on all ranks until its measured steps are done; progress is shown unless ``verb`` is empty."""
    left = settings["warmup"] + settings["rounds"] + 2  # a script in which a better mark shows up tells more
    bar, steps = Progress(left, shown=bool(verb), verb=verb), iter([1] * left)
    bar.update(f"starting {path.name}")
    say = lambda doing: bar.update(doing, next(steps, 0))
    try:
        found = run_ranks({"script": str(path), **settings}, folder, log, ranks, say)
    except HarnessError:
        bar.end_line()
        raise
    bar.close(f"{path.name}: steps by {found[0]['steps_by']}")
    return found


def slowest_of(ranks: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Seconds of each step of each round on its slowest rank."""
    every = zip(*(rank["rounds"] for rank in ranks), strict=True)
    return [[max(step) for step in zip(*steps, strict=True)] for steps in every]


def _event_plan(found: Imported, seconds: float) -> dict[str, Any]:
    """A plan with every distinct op and collective of the traces; with none if it gets no time."""
    world = found.graphs[0].world_size
    works = {work for graph in found.graphs for work in graph.works if work.kind != OPAQUE}
    collectives = sorted((w for w in works if isinstance(w, Collective) and 1 < w.group_size <= world), key=str)
    ops = sorted((work for work in works if not isinstance(work, Collective)), key=str)
    work = {"ops": [{**asdict(op), "dims": list(op.dims)} for op in ops], "collectives": list(map(asdict, collectives))}
    event = {"name": f"world{world}", "world_size": world, **work, "seconds": seconds}
    return check_plan({"schema": SCHEMA, "runs": [], "events": [event] if seconds > 0 else [], "device": "auto"})
