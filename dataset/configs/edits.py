"""Change a user's configuration to another strategy: only the settings that differ, everything else stays as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat, parse_tables, read_source
from stepsight.dataset.configs.drafts import WITH_TABLES, Given
from stepsight.dataset.configs.formats import read_configs, write_config
from stepsight.dataset.job.job import Job

_OPTION = re.compile(r"^\s*--([\w-]+)(?: (.*))?$", re.MULTILINE)
_VARIABLE = re.compile(r"[\"']?\$\{?(\w+)\}?[\"']?")
Changes = Mapping[str, tuple[Any, Any]]  # by setting: its value before and after; None: it is not there


def edit_config(path: Path, before: Job, after: Job, name: str) -> str | None:
    """The text of a configuration with the settings of another strategy.

    Args:
        path: The configuration that ``before`` was read from.
        before, after: The job as it is, and as it shall be.
        name: Format of both, as in ``write_config``.

    Returns:
        None if the file has another format; "" if it does not read as ``after`` once it is changed.
    """
    same_format = False
    given = {"cluster.hardware": after.cluster.hardware, "cluster.nodes": after.cluster.nodes}
    values = Given(values={**given, "cluster.devices_per_node": after.cluster.devices_per_node})
    try:
        written = [write_config(job, name) for job in (before, after)]
        own = read_configs([path], values).formats[0].partition("-")[0]
        tables = path.suffix in WITH_TABLES
        if own != name.partition("-")[0] or tables != (written[0].suffix in WITH_TABLES):
            return None
        same_format = True
        old, new = (_settings(one.text, path.suffix) for one in written)
        changes = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
        edit = _of_tables if tables else _of_words
        text = edit(read_source(path), changes, path.suffix)
        with TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            copy.write_text(text, encoding="utf-8")
            back = read_configs([copy], values).job
        same = _settings(write_config(back, name).text, path.suffix) == new
    except JobError:  # the changed file, or the own one without others beside it, states no job
        return "" if same_format else None
    return text if same else ""


def diff_text(path: Path, out: Path, text: str) -> str:
    """The difference between a user's file and its changed text."""
    old = read_source(path).splitlines(keepends=True)
    return "".join(unified_diff(old, text.splitlines(keepends=True), str(path), str(out), n=0))


def _settings(text: str, suffix: str) -> dict[str, Any]:
    """Settings of a written configuration, by name, but for a vocabulary, which is padded by the strategy."""
    tables = suffix in WITH_TABLES
    found = flat(parse_tables(text, suffix)) if tables else {key: value or True for key, value in _OPTION.findall(text)}
    return {name: value for name, value in found.items() if not re.search("vocab.size", name)}


def _of_words(text: str, changes: Changes, suffix: str) -> str:
    """Options of a script or a file of arguments; a value that is a variable changes where the variable is set."""
    anchor = None
    if "recompute-granularity" in changes:  # the short form of selective recomputation
        text = re.sub(r"(?<!\S)--recompute-activations(?!\S)[ \t]?", "", text)
    for name, (old, new) in changes.items():
        option = re.compile(rf"(?<![\w-])--{name}(?![\w-])" + ("" if True in (old, new) else r"(=|\s+)([^\s\\)]+)"))
        found = option.search(text)
        if found is None:
            anchor = (
                anchor or re.search(r"(?<!\S)--micro-batch-size(?=[= ])", text) or re.search(r"(?<!\S)--(?=\w)", text)
            )
            if anchor and new is not None:
                words = f"--{name} " if new is True else f"--{name} {new} "
                text = text[: anchor.start()] + words + text[anchor.start() :]
            continue
        if new is None:
            text = text[: found.start()] + text[found.end() :].removeprefix(" ")
        elif new is not True:
            variable = _VARIABLE.fullmatch(found[2])
            places = re.findall(rf"(?m)^[ \t]*(?:export[ \t]+)?{variable[1]}=.*$", text) if variable else []
            if len(places) == 1 and variable and (plain := re.fullmatch(r"(.*?=)([\w.]+)([ \t]*(?:#.*)?)", places[0])):
                text = text.replace(places[0], f"{plain[1]}{new}{plain[3]}")
            else:
                text = text[: found.start(2)] + str(new) + text[found.end(2) :]
    return text


def _of_tables(text: str, changes: Changes, suffix: str) -> str:
    """Values of TOML, YAML or JSON; new ones come first in their table."""
    equals = "=" if suffix == ".toml" else ":"
    for name, (_, new) in changes.items():
        *outer, key = name.split(".")
        value = new if isinstance(new, str) and suffix in (".yaml", ".yml") else json.dumps(new)
        value_of = r"(\[[^\]]*\]|[^#\n,}]*?)(?=[ \t]*(?:[,}#]|$))"
        words = rf"(?m)((?:^|[{{,])[ \t]*\"?{re.escape(key)}\"?[ \t]*{equals}[ \t]*){value_of}"
        header = re.search(rf"(?m)^\[{re.escape('.'.join(outer))}\][^\n]*\n", text) if suffix == ".toml" else None
        start = header.end() if header else 0
        end = re.compile(r"(?m)^\[").search(text, start) if header else None
        found = re.compile(words).search(text, start, end.start() if end else len(text))
        if found:
            text = text[: found.start()] + ("" if new is None else f"{found[1]}{value}") + text[found.end() :]
        elif new is not None and (header or (not outer and suffix in (".yaml", ".yml"))):
            text = f"{text[:start]}{key}{' =' if header else ':'} {value}\n{text[start:]}"
    return text
