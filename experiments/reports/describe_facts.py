"""``stepsight show`` of hardware, fabrics and framework profiles: presets by name, and files of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.facts_file import is_facts_file, read_facts
from stepsight.dataset.hardware.hardware import FABRICS, HARDWARE, Fabric, Hardware, facts_in, find_fabric, usual_fabric
from stepsight.dataset.job.frameworks import FRAMEWORKS, Framework, find_framework
from stepsight.dataset.job.specs import SECTIONS
from stepsight.experiments.reports.text_table import table

Thing = Hardware | Fabric | Framework
_NOUNS = {Hardware: "hardware", Fabric: "fabric", Framework: "framework"}


def facts_names() -> tuple[str, ...]:
    """Names of all hardware, fabrics and frameworks that are known."""
    return (*HARDWARE.names(), *FABRICS.names(), *FRAMEWORKS.names())


def describe_preset(name: str) -> dict[str, Any] | None:
    """Describe the hardware, fabric or framework of a name; None if there is none."""
    registry = next((each for each in (HARDWARE, FABRICS, FRAMEWORKS) if name in each), None)
    return None if registry is None else _description([(name, registry[name])], "")


def describe_facts_file(path: Path) -> dict[str, Any] | None:
    """Describe a file of hardware and fabrics, or of a framework's profile; None if it is another kind of file.

    Raises:
        JobError: If it cannot be read, or breaks a rule of these files.
    """
    if not is_facts_file(str(path)):
        return None
    try:
        tables = read_facts(str(path))
    except JobError:  # not a table of tables: reading it as a job reports what is wrong
        return None
    if not tables or set(tables) & set(SECTIONS) or "framework" in tables:
        return None
    if set(tables) & {"hardware", "fabric"}:
        hardware, fabrics = facts_in(str(path))
        return _description([*hardware.items(), *fabrics.items()], str(path))
    if len(tables) == 1 and all(isinstance(table, dict) for table in tables.values()):
        return _description([(next(iter(tables)), find_framework(str(path)))], str(path))
    return None


def _description(things: Sequence[tuple[str, Thing]], path: str) -> dict[str, Any]:
    value: dict[str, Any] = {}
    texts = []
    for name, thing in things:
        noun = _NOUNS[type(thing)]
        facts = {key: fact for key, fact in asdict(thing).items() if key != "name" and fact not in ({}, ())}
        shown = {key: fact for key, fact in facts.items() if key != "source"}
        lines = [f"{noun} {name}{f' in {path}' if path else ''}", table(["key", "value"], _rows(shown))]
        if isinstance(thing, Hardware):
            facts["usual_fabric"] = _usual_fabric(path or name)
            lines.append(f"usual fabric  {facts['usual_fabric'] or 'none: a job must state cluster.fabric'}")
        if facts.get("source"):
            lines.append(f"source        {facts['source']}")
        value.setdefault(noun, {})[name] = facts
        texts.append("\n".join(lines))
    return {**value, "text": "\n\n".join(texts)}


def _rows(facts: Mapping[str, Any], before: str = "") -> list[list[str]]:
    """Keys and values of tables within tables, one row each."""
    rows: list[list[str]] = []
    for key, fact in facts.items():
        if isinstance(fact, Mapping):
            rows += _rows(fact, f"{before}{key}.")
        else:
            text = ", ".join(fact) if isinstance(fact, tuple) else f"{fact:g}" if isinstance(fact, float) else str(fact)
            rows.append([before + key, text])
    return rows


def _usual_fabric(hardware: str) -> str:
    try:
        return find_fabric(usual_fabric(hardware)).name
    except JobError:
        return ""
