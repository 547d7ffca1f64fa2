"""Values that users state on the command line beside configuration files."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stepsight.dataset.base.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.dataset.configs.drafts import Given
    from stepsight.dataset.job.job import Job

_TOLD = ("cluster.hardware", "cluster.nodes", "batch.global_batch", "model.seq_len", "model.vocab")


def given_of(
    hardware: str = "",
    nodes: int | None = None,
    devices_per_node: int | None = None,
    *,
    framework: str = "",
    given: Sequence[str] = (),
    define: Sequence[str] = (),
    pick: str = "",
) -> Given:
    """Values from a verb's options.

    Raises:
        StepsightError: If a ``KEY=VALUE`` is none.
    """
    from stepsight.dataset.configs.drafts import Given

    values: dict[str, Any] = {}
    stated = {"cluster.hardware": hardware or None, "cluster.nodes": nodes, "framework": framework or None}
    stated["cluster.devices_per_node"] = devices_per_node
    values |= {key: value for key, value in stated.items() if value is not None}
    values |= {key: _value(text) for key, text in (_pair("--set", pair) for pair in given)}
    return Given(values=values, variables=dict(_pair("--define", pair) for pair in define), pick=pick)


def read_job(path: Path, framework: str = "", hardware: str = "", nodes: int | None = None) -> Job:
    """Read a job from a job file, or from the configuration of a training framework.

    Assumed values for keys that a configuration leaves open are printed on stderr.

    Raises:
        StepsightError: If the file is neither, or holds no whole job.
    """
    from stepsight.dataset.configs.config_formats import is_job_file
    from stepsight.dataset.configs.config_job import read_configs
    from stepsight.dataset.job.job import Job

    refuse_program(path)
    if is_job_file(path):
        job = Job.from_file(path, framework)
        return job if not hardware and nodes is None else _moved(job, hardware, nodes)
    read = read_configs([path], given_of(hardware, nodes, framework=framework))
    job = read.job
    assumed = ", ".join(f"{key} = {read.assumed[key]}" for key in _TOLD if key in read.assumed)
    told = f"{path}: read as {read.formats[0]}; assumed {assumed or 'nothing important'}; `stepsight job` lists all"
    typer.echo(told, err=True)
    return job


def refuse_program(path: Path) -> None:
    """Refuse a captured script in place of a job.

    Raises:
        StepsightError: If the folder holds one.
    """
    from stepsight.dataset.capture.captured import MANIFEST

    if (path / MANIFEST).is_file():
        raise StepsightError(f"{path} is a captured program, not a job: use `stepsight predict --program {path}`")


def _moved(job: Job, hardware: str, nodes: int | None) -> Job:
    """Return the job on other devices, with their usual fabric and a new number of replicas."""
    cluster = replace(job.cluster, hardware=hardware or job.cluster.hardware, nodes=nodes or job.cluster.nodes)
    if hardware and hardware != job.cluster.hardware:
        cluster = replace(cluster, fabric="")
    same = cluster.num_devices == job.cluster.num_devices
    return replace(job, cluster=cluster, parallel=job.parallel if same else replace(job.parallel, dp=0, dp_shard=0))


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise StepsightError(f"{option} must be KEY=VALUE, got {text!r:.80}")
    return key.strip(), value


def _value(text: str) -> Any:
    """A value as TOML writes it; a text may stand without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
