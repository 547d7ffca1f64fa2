"""Read configuration files: text, or tables of JSON, TOML or YAML, of limited size."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import parsing, read_text, read_toml, reason
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import parse_json, preset
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.sharding_plans import TABLE_MODELS
from stepsight.dataset.job.specs import MODELS, SECTIONS

MOST_CHARACTERS = 4 * 2**20
MOST_VALUES = 100_000  # of a file's tables, each counted wherever it stands (YAML repeats by reference)
MOST_DEPTH = 30
_BRACKETS = re.compile(r"[\[\]{}]")
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


def facts() -> Mapping[str, Any]:
    """What frameworks' configurations leave to the frameworks' code (``presets/configs.toml``)."""
    return preset("configs.toml")  # type: ignore[no-any-return]


def read_source(path: Path) -> str:
    """Text of a configuration file.

    Raises:
        JobError: If it cannot be read, is no text, or is too long.
    """
    with parsing(f"cannot read configuration {path}", JobError):
        text = read_text(path, "utf-8-sig")
    if len(text) > MOST_CHARACTERS:
        raise JobError(f"a configuration must have at most {MOST_CHARACTERS} characters, got {len(text)} in {path}")
    return text


def nearest(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of some files of a folder that is there; a name that is too long for a file is none."""
    for path in (folder / name for name in names):
        with suppress(OSError):
            if path.is_file():
                return path
    return None


def read_tables(path: Path) -> Mapping[str, Any]:
    """Tables of a JSON, TOML or YAML file.

    Raises:
        JobError: If it is something else, or holds more than the limits.
    """
    text = read_source(path)
    with parsing(f"{path} is not valid {path.suffix.lstrip('.').upper()}", JobError):
        value = read_toml(path, "utf-8-sig") if path.suffix == ".toml" else parse_tables(text, path.suffix)
        _count(value)
    if not isinstance(value, Mapping):
        raise JobError(f"{path} must hold tables of values, got {type(value).__name__}")
    return value


def parse_tables(text: str, suffix: str) -> Any:
    """Value of a text of JSON, TOML or YAML, by the suffix of its file.

    YAML has ``1e-5`` as a number, as in YAML 1.2, and no tags of other loaders (``!!python/...``).  If a key occurs
    twice, the last one counts, as for the frameworks: some of their own files have such keys.  Brackets that are nested
    deeply are refused first: the parser takes time in the square of the depth.
    """
    if suffix in (".toml", ".json"):
        return tomllib.loads(text) if suffix == ".toml" else parse_json(text)
    import yaml

    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > 4 * MOST_DEPTH:
            raise ValueError(f"tables must be nested at most {MOST_DEPTH} deep")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _count(value: Any, depth: int = 0) -> int:
    """Count the values of tables; too many, or too deeply nested ones, are refused."""
    if depth > MOST_DEPTH:
        raise ValueError(f"tables must be nested at most {MOST_DEPTH} deep")
    counted, items = 0, value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in items:
        counted += 1 + (_count(item, depth + 1) if isinstance(item, Mapping | list) else 0)
        if counted > MOST_VALUES:
            raise ValueError(f"a configuration must hold at most {MOST_VALUES} values")
    return counted


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, its keys joined by dots; an empty table has no value, and tables of a list have numbers."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(place): each for place, each in enumerate(value)}
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        found |= inner or {f"{prefix}{key}": None}
    return found


def read_python(path: Path) -> ast.Module:
    """Syntax tree of a Python file, which is never executed.

    Raises:
        JobError: If it is no Python.
    """
    text = read_source(path)
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise JobError(f"{path} is not valid Python: {reason(error):.200}") from None


def yaml_text(tables: Mapping[str, Any]) -> str:
    """Tables of plain values as YAML."""
    import yaml

    return str(yaml.safe_dump(tables, sort_keys=False))


def toml_text(tables: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Tables of plain values as TOML, with comments after values (by key: ``model.layers``)."""
    lines = [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for section, table in tables.items():
        if not isinstance(table, Mapping) or not table:
            continue
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value in table.items():
            line, comment = f"{key} = {_toml(value)}", " ".join((comments or {}).get(f"{section}.{key}", "").split())
            comment = "".join(char if char.isprintable() else "?" for char in comment)
            lines.append(f"{line:<32} # {comment}" if comment else line)
    text = "\n".join(lines) + "\n"
    tomllib.loads(text)  # what we write can be read
    return text


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in escaped) + '"'
    return repr(value)


def job_toml(job: Job) -> str:
    """Write a job file that reads back as an equal job, without defaults and what its framework's profile fills in.

    What a profile fills in depends on what is stated, so that the tables are compared with it several times.  A known
    model fills in its own values, so that others are stated even where they are defaults.
    """
    told, profile = {"execution": asdict(job.execution), **job.to_dict()}, job.profile
    known = {"model": MODELS.get(job.model.name) or TABLE_MODELS.get(job.model.name, {})}
    stated: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if profile is not None:  # which might interleave stages that a job leaves open
        stated["parallel"]["virtual_stages"] = job.parallel.virtual_stages
    for _ in range(4):
        filled = profile.fill(stated) if profile is not None else {}
        for section, item in ((section, item) for section, spec in SECTIONS.items() for item in fields(spec)):
            value, of_model = (tables.get(section, {}).get(item.name) for tables in (told, known))
            usual = filled.get(section, {}).get(item.name, item.default)
            if value is not None and (value != usual or of_model not in (None, value)):
                stated[section][item.name] = value
    return toml_text({**({"framework": job.framework} if job.framework else {}), **stated})
