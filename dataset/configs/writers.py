"""Jobs as configurations of training frameworks, by the name of a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.huggingface_out import write_accelerate, write_deepspeed, write_huggingface
from stepsight.dataset.configs.job_view import ConfigText
from stepsight.dataset.configs.megatron_out import write_megatron
from stepsight.dataset.configs.torchtitan_out import write_torchtitan
from stepsight.dataset.configs.yaml_out import write_maxtext, write_nanotron
from stepsight.dataset.job.job import Job, JobLike

WRITERS: Mapping[str, Callable[[Job], ConfigText]] = MappingProxyType(
    {
        "megatron": write_megatron,
        "megatron-script": partial(write_megatron, script=True),
        "torchtitan": write_torchtitan,
        "deepspeed": write_deepspeed,
        "accelerate": write_accelerate,
        "huggingface": write_huggingface,
        "nanotron": write_nanotron,
        "maxtext": write_maxtext,
    }
)


def write_config(job: JobLike, name: str) -> ConfigText:
    """Write a job as a configuration.

    Args:
        job: As in ``predict``.
        name: A key of ``WRITERS``.

    Returns:
        The text, the keys that the framework does not express, and notes for the user.

    Raises:
        JobError: If the format is unknown, or the framework has no such model.

    Example:
        >>> print(write_config(Job.from_file("job.toml"), "megatron").text)  # doctest: +SKIP
    """
    if name not in WRITERS:
        raise JobError(f"a configuration must be of {', '.join(WRITERS)}, got {name!r:.80}")
    return WRITERS[name](Job.of(job))
