"""Jobs from the configuration files of training frameworks: what files leave open is derived or assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import toml_text
from stepsight.dataset.configs.drafts import Draft, Given
from stepsight.dataset.configs.formats import read_config
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SECTIONS

HARDWARE, DEVICES_PER_NODE = "h100-sxm-80gb", 8
_MOST_TRIED = 1024  # numbers of devices
_NEEDED = ("family", "layers", "hidden", "heads", "vocab", "seq_len")


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
        _apply_given(draft, given)
        missing = _missing_sizes(draft)
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
    _complete(draft, given)
    framework = given.values.get("framework", draft.framework)
    tables = {name: table for name, table in draft.tables.items() if table}
    return Job.from_dict({"framework": framework, **tables} if framework else tables)


def _apply_given(draft: Draft, given: Given) -> None:
    """Set the user's values, which override the configurations.

    Raises:
        JobError: If a key is not a job's.
    """
    for key, value in given.values.items():
        section, _, name = key.partition(".")
        if key != "framework" and (section not in SECTIONS or name not in SECTIONS[section].__annotations__):
            raise JobError(f"a value must be given for a key of a job, as model.seq_len, got {key!r:.80}")
        if key != "framework":
            draft.map(key, value, "given")


def _missing_sizes(draft: Draft) -> list[str]:
    """Missing sizes of the model, as keys of a job."""
    if draft.get("model.name") is not None:
        return []
    return [f"model.{name}" for name in _NEEDED if draft.get(f"model.{name}") is None]


def _complete(draft: Draft, given: Given) -> None:
    """Fill the missing keys of the cluster and the batch."""
    _cluster(draft, given)
    _batch(draft)
    draft.assume("batch.precision", "bf16", "no configuration states a precision")


def _cluster(draft: Draft, given: Given) -> None:
    draft.assume("cluster.hardware", HARDWARE, "no configuration states the hardware: give it")
    draft.assume("cluster.devices_per_node", DEVICES_PER_NODE, "no configuration states the devices of a node")
    per_node = _degree_of(draft.get("cluster.devices_per_node"))
    others = draft.degree("tp") * draft.degree("cp") * draft.degree("pp")
    least, words = _least_devices(draft, others)
    reason = words
    if "cluster.nodes" in given.values:
        return
    stated = draft.get("cluster.nodes")
    replicas = draft.facts.get("replicas", 0)  # that the batch implies
    devices = draft.facts.get("devices") or replicas * others or (stated * per_node if isinstance(stated, int) else 0)
    if devices and devices % least == 0 and devices >= least and _shares_batch(draft, devices // others):
        wanted, reason = devices, f"the run has {devices} devices"
    elif draft.get("parallel.dp") is None:
        held = bool(devices) and devices % least == 0
        reason = f"{devices} devices cannot {'share the global batch' if held else f'hold {reason}'}"
        reason = reason if devices else f"{words} in whole nodes"
        wanted = _fitting(draft, least, others, devices if held else math.lcm(least, per_node))
    else:
        wanted = least
    if stated is not None and stated * per_node == wanted:
        return
    if wanted < per_node or wanted % per_node:
        if "cluster.devices_per_node" in given.values:
            return
        per_node = math.gcd(wanted, per_node)
        draft.tables["cluster"].pop("devices_per_node")
        draft.sources.pop("cluster.devices_per_node", None)
        draft.assume("cluster.devices_per_node", per_node, f"{wanted} devices are needed: {reason}")
    draft.tables["cluster"].pop("nodes", None)
    draft.sources.pop("cluster.nodes", None)
    draft.assume("cluster.nodes", wanted // per_node, f"{wanted} devices are needed: {reason}")


def _shares_batch(draft: Draft, replicas: int) -> bool:
    """Whether replicas share the stated global batch evenly."""
    total, micro = draft.get("batch.global_batch"), _degree_of(draft.get("batch.micro_batch", 1))
    return not isinstance(total, int) or total % max(1, replicas * micro) == 0


def _fitting(draft: Draft, least: int, others: int, most: int) -> int:
    """The largest number of devices, up to a limit, whose replicas share the global batch evenly."""
    total, micro = draft.get("batch.global_batch"), _degree_of(draft.get("batch.micro_batch", 1))
    if not isinstance(total, int):
        return most
    counts = range(most, max(0, most - least * _MOST_TRIED), -least)
    return next((count for count in counts if count % least == 0 and total % (count // others * micro) == 0), least)


def _degree_of(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else DEVICES_PER_NODE


def _least_devices(draft: Draft, others: int) -> tuple[int, str]:
    """The smallest number of devices for the parallel degrees, and the degrees in words."""
    words = " * ".join(f"{name} {draft.degree(name)}" for name in ("tp", "cp", "pp") if draft.degree(name) > 1)
    dp = draft.get("parallel.dp")
    if isinstance(dp, int) and dp > 0:
        return others * dp, f"{words} * dp {dp}" if words else f"dp {dp}"
    ep = draft.degree("ep")
    group = draft.degree("cp") * (draft.degree("tp") if draft.get("parallel.expert_tp") == 1 else 1)
    shard = draft.get("parallel.dp_shard") or 1
    replicas = math.lcm(ep // math.gcd(ep, group), shard)
    more = f"{' * ' if words else ''}dp {replicas} (ep {ep})" if replicas > 1 else ""
    return others * replicas, (words + more) or "one replica"


def _batch(draft: Draft) -> None:
    cluster = draft.tables["cluster"]
    devices = _degree_of(cluster.get("nodes")) * _degree_of(cluster.get("devices_per_node"))
    others = draft.degree("tp") * draft.degree("cp") * draft.degree("pp")
    dp = draft.get("parallel.dp") or max(1, devices // others)
    copies = draft.facts.get("replicas_of_shards", 0)
    if copies > 1 and dp % copies == 0:
        draft.assume("parallel.dp_shard", dp // copies, f"{copies} copies of the shards in dp {dp}")
    total, accumulation = draft.get("batch.global_batch"), draft.facts.get("accumulation", 0)
    if draft.get("batch.micro_batch") is None and isinstance(total, int) and accumulation:
        size = max(1, total // (dp * accumulation))
        draft.assume("batch.micro_batch", size, f"global_batch {total} over dp {dp} and {accumulation} micro-batches")
    draft.assume("batch.micro_batch", 1, "no configuration states a micro-batch")
    micro = _degree_of(draft.get("batch.micro_batch"))
    if draft.facts.get("local_batch"):
        local = draft.facts["local_batch"]
        draft.assume("batch.global_batch", local * dp, f"{local} sequences of each of dp {dp} replicas")
    count = accumulation or max(1, draft.degree("pp") if draft.degree("pp") > 1 else 1)
    why = f"micro_batch {micro} * dp {dp} * {count} micro-batches"
    draft.assume("batch.global_batch", micro * dp * count, f"no configuration states a global batch: {why}")
