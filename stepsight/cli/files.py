"""What verbs read, and what they write: predictors, jobs, and files that must not replace a user's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepsight.cli.options import Written, note, pairs
from stepsight.dataset.base.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.dataset.configs.formats import ConfigJob
    from stepsight.dataset.job.job import Job
    from stepsight.experiments.search.settings import Goal
    from stepsight.training.predictor.predictor import Predictor

Plot = Annotated[Path | None, Written((".png", ".svg", ".pdf"))]
JOB_FILE = Written((".toml",), rb"framework = |\[model\]")  # as we write it: no table of prices, no job with comments
_TOLD = ("cluster.hardware", "cluster.nodes", "batch.global_batch", "model.seq_len", "model.vocab")

Prices = Annotated[
    Path | None,
    typer.Option(
        help="A .toml file with a table [price_per_device_hour] by hardware, and optionally [power_w], which replaces "
        "the watts of the datasheets."
    ),
]
Box = Annotated[
    str | None,
    typer.Option(
        help="Run in a cluster made of network namespaces: nodes x ranks per node @ link rate, for example "
        "4x1@200mbit, or a .toml file. Ranks sleep instead of computing. Needs root and iproute2."
    ),
]
Force = Annotated[bool, typer.Option(help="Overwrite the file of --out if it exists; for configurations, with --to.")]


@dataclass(frozen=True, kw_only=True)
class LearnedSource:
    """A predictor.

    Attributes:
        predictor: Folder of a trained predictor, name of a shipped one or its hardware's (a100-sxm), a registered one
            (models:/h100@champion), `physics` (the shipped one without the correction that published runs near the job
            give), or `roofline`. Default: the shipped predictor for the job's hardware; if there is
            none, a roofline from hardware facts. The answer names its source.
    """

    predictor: Annotated[Path | None, "-p"] = None

    def load(self) -> Predictor | str | None:
        """What ``predict`` takes as its predictor."""
        return load_predictor(self.predictor)


@dataclass(frozen=True, kw_only=True)
class Source(LearnedSource):
    """What knows durations: a predictor, or a latency model of the user.

    Attributes:
        latency: Use your own latency model instead of a predictor: a registered name, or module:function. The function
            is called with a Hardware and a Fabric and returns an object with the method op_seconds(ops). The module's
            code is run.
    """

    latency: str = ""

    def load(self) -> Predictor | str | None:
        if not self.latency:
            return super().load()
        if self.predictor is not None:
            raise StepsightError("--predictor is another source of durations than --latency: leave one out")
        from stepsight.simulator.durations.latency_model import LATENCY

        if "" not in sys.path:  # modules of the current folder can be named, as with `python -m`
            sys.path.insert(0, "")
        return LATENCY + self.latency


def load_predictor(named: Path | None) -> Predictor | str | None:
    """What ``--predictor`` names; None: what suits the job."""
    from stepsight.training.prediction.prediction import is_word
    from stepsight.training.tracking.tracking import load_predictor as load

    return None if named is None else str(named) if is_word(named) else load(named)


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What overrides a job's file.

    Attributes:
        framework: Framework that runs the job, for example megatron-core or torchtitan. Its profile sets the keys that
            the job file leaves open. Overrides `framework` of the file.
        hardware: Name of the devices; overrides the file. Configurations of frameworks do not state it.
        given: Set a key of the job, for example model.seq_len=4096; wins over the file. Repeatable.
    """

    framework: str = ""
    hardware: str = ""
    given: Annotated[list[str] | None, "--set", typer.Option(metavar="KEY=VALUE")] = None

    def read(self, path: Path | Sequence[Path], nodes: int | None = None) -> Job:
        """Read a job from a job file, or from the configurations of one run; assumed values are printed on stderr."""
        found = self.read_all([path] if isinstance(path, Path) else path, nodes)
        if len(found) > 1:
            raise StepsightError(f"one job is asked about, got {len(found)}: name one file, or the files of one run")
        return found[0]

    def read_all(self, paths: Sequence[Path], nodes: int | None = None) -> list[Job]:
        """Read a job from each file; configurations of which one states no model are those of one run."""
        from stepsight.dataset.configs.formats import ConfigJob

        read = [([path], self._read([path], nodes)) for path in paths]
        if len(paths) > 1 and any(getattr(found, "read", found) is None for _, found in read):
            whole = [str(path) for (path,), found in read if getattr(found, "read", found) is not None]
            if len(whole) > 1:
                raise StepsightError(f"files of one run state its model once, got {', '.join(whole)}: ask about each")
            read = [([*paths], self._read(paths, nodes))]
        for files, found in read:
            if isinstance(found, ConfigJob) and found.read is not None:
                assumed = ", ".join(f"{key} = {found.assumed[key]}" for key in _TOLD if key in found.assumed)
                told = f"read as {' and '.join(found.formats)}; assumed {assumed or 'nothing important'}"
                where = ", ".join(map(str, files))
                note(f"{where}: {told}; `stepsight job` lists all")
        return [found.job if isinstance(found, ConfigJob) else found for _, found in read]

    def _read(self, paths: Sequence[Path], nodes: int | None) -> Job | ConfigJob:
        from stepsight.dataset.configs.drafts import Given
        from stepsight.dataset.configs.formats import is_job_file, read_configs
        from stepsight.dataset.job.job import Job

        values = stated_keys(paths, self.given, self.hardware, nodes)
        if len(paths) == 1 and is_job_file(paths[0]):
            return Job.from_file(paths[0], self.framework, values)
        return read_configs(paths, Given(values=values | ({"framework": self.framework} if self.framework else {})))


@dataclass(frozen=True, kw_only=True)
class MovedJobOptions(JobOptions):
    """What overrides a job's file, with the size of the cluster.

    Attributes:
        nodes: Number of nodes; overrides the file.
    """

    nodes: Annotated[int | None, typer.Option(min=1)] = None

    def read(self, path: Path | Sequence[Path], nodes: int | None = None) -> Job:
        return super().read(path, self.nodes)


def stated_keys(paths: Sequence[Path], told: Sequence[str] | None, hardware: str, nodes: int | None) -> dict[str, Any]:
    """Keys of a job that ``--set`` states, and ``--hardware`` and ``--nodes``; what follows from these in a job file,
    the number of replicas and the links, is open again.
    """
    from stepsight.dataset.base.files import read_document
    from stepsight.dataset.configs.formats import is_job_file
    from stepsight.dataset.hardware.hardware import canonical_hardware
    from stepsight.experiments.questions.sweep import toml_value

    for path in paths:
        refuse_program(path)
    given = pairs("--set", told, toml_value)
    values = given | ({"cluster.hardware": hardware} if hardware else {}) | ({"cluster.nodes": nodes} if nodes else {})
    document = read_document(paths[0], f"job file {paths[0]}") if len(paths) == 1 and is_job_file(paths[0]) else {}
    cluster = document.get("cluster") if isinstance(document, dict) else None
    own = {"nodes": 1, "hardware": "", **cluster} if isinstance(cluster, dict) else {}
    own |= {key.removeprefix("cluster."): value for key, value in given.items() if own and key.startswith("cluster.")}
    if own and nodes and nodes != own["nodes"]:
        values = {"parallel.dp": 0, "parallel.dp_shard": 0, **values}
    names = [canonical_hardware(each) if isinstance(each, str) else each for each in (hardware, own.get("hardware"))]
    if hardware and own.get("fabric") and names[0] != names[1] and "cluster.fabric" not in given:
        usual = f"the usual fabric of {hardware} replaces the job's own; --set cluster.fabric=NAME states one"
        note(f"{paths[0]}: {usual}")
        values["cluster.fabric"] = ""
    return values


def refuse_program(path: Path) -> None:
    """Refuse the folder of a captured script in place of a job."""
    from stepsight.dataset.capture.captured import MANIFEST

    if (path / MANIFEST).is_file():
        raise StepsightError(f"{path} is a captured program, not a job: use `stepsight predict --program {path}`")


def goal_of(tokens: float, prices: Path | None, **more: Any) -> Goal:
    """The goal of a training, from the options."""
    from stepsight.experiments.search.settings import Goal, read_prices

    price, power = ({}, {}) if prices is None else read_prices(prices)
    return Goal(tokens=tokens, prices=price, power_w=power, **more)


def check_job_output(out: Path | None, to: str, read: Sequence[Path], force: bool = False) -> None:
    """Check, before the work, that a job, or a configuration in the format ``to``, can be written and replaces no file
    of the user; ``read``: the files that the verb reads.
    """
    from stepsight.dataset.base.files import check_output_file

    if out is None:
        return
    if any(out.exists() and each.exists() and out.samefile(each) for each in read):
        raise StepsightError(f"--out must not be a file that is read, got {str(out)!r:.80}: name a new file")
    if not to:
        JOB_FILE.checked("--out", out)
    check_output_file(out)
    if to and out.exists() and not force:
        raise StepsightError(f"--out must be a new file, got {str(out)!r:.80}: name another one, or give --force")
