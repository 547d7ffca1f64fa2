"""``stepsight collect --script``: make a collection from a user's training script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import check_writable, digest, new_folder, read_json, write_json
from stepsight.dataset.graph.program import OPAQUE
from stepsight.dataset.harness.base.atomic_files import locked
from stepsight.dataset.harness.base.plan_error import HarnessError
from stepsight.dataset.harness.plan import SCHEMA, check_plan
from stepsight.dataset.harness.running.progress import Progress
from stepsight.dataset.harness.scripts.launch import Ranks, run_ranks
from stepsight.dataset.kinds.op import Collective
from stepsight.dataset.runs.run_folder import read_imported, write_imported
from stepsight.dataset.traces.import_traces import Imported, import_ranks
from stepsight.experiments.tasks.collecting import available_ranks, collection_text, run_plan

TRACED = "traced"  # folder in a collection: files that the script wrote
FACTS = "script.json"


@dataclass(frozen=True)
class Script:
    """A script and its measurement settings.

    Attributes:
        path: The file.
        arguments: Its own.
        ranks: None: one process that knows of no ranks.
        counts: ``warmup``, ``rounds``, ``steps`` and ``profile_steps``.
        timeout_s: Within which all its measured steps must be through.
        role: What the run is for.
    """

    path: Path
    arguments: Sequence[str]
    ranks: int | None
    counts: dict[str, int]
    timeout_s: float
    role: str

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
    """Ranks that ``--nproc-per-node`` asks for.

    Raises:
        CollectError: If it is no number >= 1, nor a word of torchrun for as many as there can be.
    """
    if text is None:
        return None
    if text in ("auto", "cpu", "gpu"):
        return available_ranks()
    if not text.isdecimal() or int(text) < 1:
        raise CollectError(f"--nproc-per-node must be a whole number >= 1 or auto, got {text!r:.80}")
    return int(text)


def collect_script(script: Script, out: Path, event_seconds: float, *, progress: bool = True) -> dict[str, Any]:
    """Run a script, trace it, import the traces, and measure its distinct ops and collectives.

    A killed collection resumes: with the script, with the import, or where the measurements stopped.

    Raises:
        CollectError: If the script cannot be measured, or the folder holds something else.
    """
    _check(script, out)
    out.mkdir(parents=True, exist_ok=True)
    folder = out / TRACED / script.name
    with locked(out / ".lock") as ours:
        if not ours:
            raise CollectError(f"another collection is writing to {out}: wait for its end, or choose another folder")
        if not (folder / FACTS).exists():
            _run(script, folder, out / "logs" / "script.log", progress)
        facts = read_json(folder / FACTS)
        if not (out / "plan.json").exists():
            found = import_ranks(_files(folder, facts, "kineto"), _files(folder, facts, "et"))
            plan = _event_plan(found, event_seconds)
            more = {name: facts[name] for name in ("role", "rounds", "profiled_seconds", "script", "arguments")}
            write_imported(found.graphs, found.sources, out, None, found.warnings, name=script.name, more=more)
            write_json(out / "plan.json", plan)
    summary = run_plan(read_json(out / "plan.json"), out, progress=progress)
    seconds = [each for steps in facts["rounds"] for each in steps]
    warnings = list(read_imported(out / "runs" / script.name).warnings)
    told = {"run": script.name, "steps_by": facts["steps_by"], "step_seconds": seconds, "warnings": warnings}
    text = "\n".join([collection_text(out), *(f"warning: {each}" for each in warnings)])
    return {**summary, **told, "runs": 1, "text": text}


def _check(script: Script, out: Path) -> None:
    if not script.path.is_file():
        raise CollectError(f"--script takes a Python file, got no file {script.path}")
    if script.ranks is not None and script.ranks > available_ranks():
        raise CollectError(
            f"every rank needs a core (or GPU) of its own: --nproc-per-node <= {available_ranks()} here, "
            f"got {script.ranks}"
        )
    if out.exists() and not out.is_dir():
        raise CollectError(f"a collection is a folder, got the file {out}")
    check_writable(out)
    others = [path.name for path in (out / TRACED).glob("[!.]*") if path.name != script.name]
    if others or ((out / "plan.json").exists() and not (out / TRACED / script.name).exists()):
        raise CollectError(
            f"a folder holds one script with its arguments, or one plan: {out} was begun with another; choose another "
            "folder (and name both when you train)"
        )


def _run(script: Script, folder: Path, log: Path, progress: bool) -> None:
    """Run the script; its folder is written completely or not at all."""
    ranks = Ranks.as_python() if script.ranks is None else Ranks.as_torchrun(script.ranks)
    settings = {"arguments": list(script.arguments), "timeout_s": script.timeout_s, **script.counts}
    try:
        with new_folder(folder) as part:
            found = run_script(script.path, settings, part, log, ranks, progress=progress)
            write_json(part / FACTS, {**script.facts, **_merged(found)})
    except HarnessError as error:
        raise CollectError(str(error)) from None


def run_script(
    path: Path,
    settings: dict[str, Any],
    folder: Path,
    log: Path,
    ranks: Ranks,
    *,
    progress: bool,
    verb: str = "collect",
) -> list[dict[str, Any]]:
    """Run a script on all ranks until its measured steps are done; the arguments are those of ``run_ranks``.

    Raises:
        HarnessError: As ``run_ranks``.
    """
    left = [1] * (settings["warmup"] + settings["rounds"] + 2)  # a script in which a better mark shows up tells more
    bar = Progress(len(left), shown=progress, verb=verb or "collect")
    bar.update(f"starting {path.name}")

    def say(doing: str) -> None:
        bar.update(doing, left.pop() if left else 0)

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


def _merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the measurements of all ranks: a step takes as long as on its slowest rank."""
    profiled = [max(column) for column in zip(*(r["profiled_seconds"] for r in ranks), strict=True)]
    shared = {name: ranks[0][name] for name in ("steps_by", "device", "threads")}
    files = {str(r["rank"]): r["traces"] for r in ranks}
    digests = {name: found for r in ranks for name, found in r["digests"].items()}
    memory = [r["peak_memory_bytes"] for r in ranks if r["peak_memory_bytes"] is not None]
    measured = {"rounds": slowest_of(ranks), "profiled_seconds": profiled, "traces": files, "digests": digests}
    return {**shared, **measured, "peak_memory_bytes": memory}


def _files(folder: Path, facts: dict[str, Any], form: str) -> list[Path]:
    return [folder / files[form] for _, files in sorted(facts["traces"].items(), key=lambda item: int(item[0]))]


def _event_plan(found: Imported, seconds: float) -> dict[str, Any]:
    """A plan with every distinct op and collective of the traces; None if it gets no time."""
    world = found.graphs[0].world_size
    works = {work for graph in found.graphs for work in graph.works if work.kind != OPAQUE}
    collectives = sorted((w for w in works if isinstance(w, Collective) and 1 < w.group_size <= world), key=str)
    ops = sorted((work for work in works if not isinstance(work, Collective)), key=str)
    event = {
        "name": f"world{world}",
        "world_size": world,
        "ops": [{**asdict(op), "dims": list(op.dims)} for op in ops],
        "collectives": [asdict(each) for each in collectives],
        "seconds": seconds,
    }
    return check_plan({"schema": SCHEMA, "runs": [], "events": [event] if seconds > 0 else [], "device": "auto"})
