"""Clusters in a box: number of nodes, ranks on each, rate of their links; and the cluster that a job sees."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware import BOX, Fabric, fabric_from_dict
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import SlowLink

HARDWARE = BOX
_TEXT = re.compile(r"(\d+)x(\d+)@(\d+(?:\.\d+)?)(mbit|gbit)")
_INTRA = {"bandwidth_gbytes_per_s": 1.0, "latency_us": 100.0}  # TCP within one namespace
_INTER_LATENCY_US = 150.0


@dataclass(frozen=True)
class Box:
    """A cluster in a box."""

    nodes: int  # sizes
    ranks_per_node: int
    mbits_per_s: tuple[float, ...]  # rate of every node's link, both ways
    latency_ms: tuple[float, ...] = ()  # delay of everything that leaves each node; empty: none

    def __post_init__(self) -> None:
        _check(self.to_dict())

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """``4x1@200mbit``; if links differ, the fastest rate and the number of slower links."""
        fastest = max(self.mbits_per_s)
        slower = sum(rate < fastest for rate in self.mbits_per_s)
        late = f"-{max(self.latency_ms):g}ms" if any(self.latency_ms) else ""
        return f"{self.nodes}x{self.ranks_per_node}@{fastest:g}mbit" + (f"-{slower}slow" if slower else "") + late

    @property
    def fabric(self) -> dict[str, Any]:
        """The ``[cluster] fabric`` of a job: the fastest link, shared by a node's ranks, and the longest latency."""
        from stepsight.dataset.harness.running.box import BURST_BYTES

        rate = max(self.mbits_per_s) / 8e3 / self.ranks_per_node
        return {
            "intra_node": dict(_INTRA),
            "inter_node": {
                "bandwidth_gbytes_per_s": rate,
                "latency_us": _INTER_LATENCY_US + 1e3 * max(self.latency_ms, default=0.0),
                "burst_bytes": BURST_BYTES / self.ranks_per_node,
            },
        }

    @property
    def links(self) -> Fabric:
        """The box's links as a ``Fabric``."""
        return fabric_from_dict(self.name, self.fabric)

    def holds(self, job: Job) -> Job:
        """The job on this box: the devices are the box's ranks, which sleep as long as ``HARDWARE`` would compute."""
        fastest = max(self.mbits_per_s)
        slow = tuple(
            SlowLink(node=node, slowdown=fastest / rate) for node, rate in enumerate(self.mbits_per_s) if rate < fastest
        )
        cluster = replace(
            job.cluster, hardware=HARDWARE, nodes=self.nodes, devices_per_node=self.ranks_per_node, fabric=self.fabric,
            slow_links=slow,
        )  # fmt: skip
        return replace(job, cluster=cluster)

    @classmethod
    def from_dict(cls, table: Any) -> Box:
        """Read the result of ``to_dict``."""
        _check(table)
        return cls(
            table["nodes"], table["ranks_per_node"], tuple(table["mbits_per_s"]), tuple(table.get("latency_ms", ()))
        )

    def to_dict(self) -> dict[str, Any]:
        """The box as a table of a plan."""
        rates = list(self.mbits_per_s)
        table: dict[str, Any] = {"nodes": self.nodes, "ranks_per_node": self.ranks_per_node, "mbits_per_s": rates}
        return {**table, "latency_ms": list(self.latency_ms)} if self.latency_ms else table


def _check(table: Any) -> None:
    from stepsight.dataset.harness.plan.plan_checks import box_problems  # the harness's rules, if there is a box

    problems = box_problems(table)
    if problems:
        raise JobError("; ".join(problems))


def read_box(text: str) -> Box:
    """A box from ``4x1@200mbit`` (nodes x ranks per node @ rate of each link), or from a TOML file.

    The file has ``nodes``, ``ranks_per_node`` and ``mbits_per_s``, one number or one for each node, and maybe
    ``latency_ms`` likewise.

    Raises:
        JobError: If it is neither.
    """
    found = _TEXT.fullmatch(text)
    if found:
        nodes, ranks, rate = int(found[1]), int(found[2]), float(found[3]) * (1000 if found[4] == "gbit" else 1)
        return Box(nodes, ranks, (rate,) * min(nodes, 10_000))
    path = Path(text)
    if path.suffix != ".toml":
        raise JobError(
            f"a box is nodes x ranks per node @ link rate, as in 4x1@200mbit, or a .toml file, got {text!r:.80}"
        )
    try:
        table = read_toml(path)
    except OSError as error:
        raise JobError(f"cannot read box {path}: {error.strerror}") from None
    except RecursionError:
        raise JobError(f"{path} must be a table of values, got tables nested too deeply") from None
    except ValueError as error:
        raise JobError(f"{path} must be TOML, got {error}") from None
    for key in ("mbits_per_s", "latency_ms"):
        number = table.get(key)
        if isinstance(number, int | float) and isinstance(table.get("nodes"), int):
            table[key] = [number] * min(table["nodes"], 10_000)
    try:
        return Box.from_dict(table)
    except JobError as error:
        raise JobError(f"{path}: {error}") from None
