"""Jobs from the configuration files of training frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.completion import apply_given, complete, missing_sizes
from stepsight.dataset.configs.documents import toml_text
from stepsight.dataset.configs.drafts import Draft, Given
from stepsight.dataset.configs.formats import read_config
from stepsight.dataset.job.job import Job


@dataclass(frozen=True, kw_only=True)
class ConfigJob:
    """A job that was read from configuration files, and how.

    Attributes:
        read: The job; None if the configurations do not state all sizes of the model.
        missing: Sizes of the model that no configuration states.
        tables: Tables of a job file: ``mapped`` and ``assumed`` in their sections.
        mapped: Values that a configuration states, by key of the job (``model.layers``).
        assumed: Values that no configuration states, by key of the job.
        sources: The words of the configuration, by key of ``mapped``.
        reasons: Why a value is assumed, by key of ``assumed``.
        ignored: Settings that no key of a job expresses.
        formats: Format of each file.
    """

    read: Job | None
    tables: Mapping[str, Any]
    mapped: Mapping[str, Any]
    assumed: Mapping[str, Any]
    sources: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    formats: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            JobError: If the configurations do not state all sizes of the model.
        """
        if self.read is None:
            raise JobError(
                f"no configuration states {', '.join(self.missing)}: name the file that does, as a model's "
                "config.json, or give the values"
            )
        return self.read

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "mapped": dict(self.mapped),
            "assumed": dict(self.assumed),
            "ignored": list(self.ignored),
            "sources": dict(self.sources),
            "reasons": dict(self.reasons),
            "formats": list(self.formats),
            "missing": list(self.missing),
        }

    def to_toml(self) -> str:
        """A job file, with where each value comes from."""
        comments = {key: f"from {words}" for key, words in self.sources.items()}
        comments |= {key: f"assumed: {why}" for key, why in self.reasons.items()}
        return toml_text(self.tables, comments)


def read_configs(paths: str | Path | Sequence[str | Path], given: Given | None = None) -> ConfigJob:
    """Read a job from configuration files: one that states the model, and others that state how it is trained.

    Nothing is executed: scripts and Python files are parsed.

    Args:
        paths: One or several configuration files of Megatron-LM, torchtitan, Hugging Face, DeepSpeed, Accelerate,
            Nanotron, MaxText or NeMo, or a job file; later files override earlier ones.
        given: Values that no file states, or that override the files: ``Given(values={"cluster.nodes": 16})``.

    Returns:
        The job (``.job``), and what was ``mapped``, ``assumed`` and ``ignored``.

    Raises:
        JobError: If a file cannot be read or recognised, or no job follows.

    Example:
        >>> read_configs([Path("pretrain_gpt.sh")]).job  # doctest: +SKIP
    """
    given = given or Given()
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not files:
        raise JobError("a configuration must be named, got none")
    draft, formats = Draft(), []
    for path in files:
        formats.append(read_config(path, draft, given))
    try:
        apply_given(draft, given)
        missing = missing_sizes(draft)
        job = None if missing else _job(draft, given)
    except JobError as error:
        raise JobError(f"{', '.join(map(str, files))}: {error}") from None
    framework = given.values.get("framework", draft.framework)
    tables = {name: table for name, table in draft.tables.items() if table}
    keys = [f"{section}.{name}" for section, table in tables.items() for name in table]
    return ConfigJob(
        read=job,
        tables={"framework": framework, **tables} if framework else tables,
        mapped={key: draft.get(key) for key in keys if key not in draft.reasons},
        assumed={key: draft.get(key) for key in keys if key in draft.reasons},
        sources=dict(draft.sources),
        reasons=dict(draft.reasons),
        ignored=tuple(draft.ignored),
        formats=tuple(formats),
        missing=tuple(missing),
    )


def _job(draft: Draft, given: Given) -> Job:
    complete(draft, given)
    framework = given.values.get("framework", draft.framework)
    tables = {name: table for name, table in draft.tables.items() if table}
    return Job.from_dict({"framework": framework, **tables} if framework else tables)
