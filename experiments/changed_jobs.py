"""A job with some of its keys changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SECTIONS

FABRIC_KEYS = tuple(
    f"cluster.fabric.{link}.{fact}"
    for link in ("intra_node", "inter_node")
    for fact in ("bandwidth_gbytes_per_s", "latency_us")
)
_REPLICAS = ("parallel.dp", "parallel.dp_shard")  # these follow from the rest, unless they are changed themselves
_DEGREES = ("parallel.tp", "parallel.cp", "parallel.pp", "cluster.nodes", "cluster.devices_per_node")


def change_job(job: Job, values: Mapping[str, Any]) -> Job:
    """Change keys of a job; the number of replicas follows, unless it is changed itself.

    Args:
        job: The job to start from; it stays as it is.
        values: New values by key, such as ``cluster.nodes``, ``model.seq_len`` or
            ``cluster.fabric.inter_node.latency_us``.

    Raises:
        JobError: If a key is unknown, or the changed job breaks a rule.
    """
    unknown = [key for key in values if key not in known_keys()]
    if unknown:
        raise JobError(f"{unknown[0]!r:.80} is not a key of a job{did_you_mean(unknown[0], known_keys())}")
    stated = dict(values)
    if any(key in values for key in _DEGREES):
        stated = {**{key: 0 for key in _REPLICAS if key not in values}, **stated}
    tables: dict[str, dict[str, Any]] = {}
    for key, value in stated.items():
        section, _, name = key.partition(".")
        if key not in FABRIC_KEYS:
            tables.setdefault(section, {})[name] = value
    links = {key: value for key, value in values.items() if key in FABRIC_KEYS}
    if links:
        tables.setdefault("cluster", {})["fabric"] = _fabric_table(job, links)
    return replace(job, **{section: replace(getattr(job, section), **table) for section, table in tables.items()})


def known_keys() -> tuple[str, ...]:
    """Every key that ``change_job`` accepts."""
    keys = [f"{section}.{field.name}" for section, spec in SECTIONS.items() for field in fields(spec)]
    return (*keys, *FABRIC_KEYS)


def _fabric_table(job: Job, links: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The job's links as a table, with some numbers changed."""
    fabric, table = job.fabric, {}
    for name, link in (("intra_node", fabric.intra_node), ("inter_node", fabric.inter_node)):
        table[name] = {
            "bandwidth_gbytes_per_s": link.bandwidth_bytes_per_s / 1e9,
            "latency_us": link.latency_s * 1e6,
            "burst_bytes": link.burst_bytes,
            "ll128": link.ll128,
            "message_us": link.message_s * 1e6,
        }
        if link.adapter_bytes_per_s:
            table[name]["adapter_gbytes_per_s"] = link.adapter_bytes_per_s / 1e9
    for key, value in links.items():
        _, _, name, fact = key.split(".")
        table[name][fact] = value
    return table
