"""Change a user's configuration to another strategy: only the settings that differ, everything else stays as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.documents import flat, parse_tables, read_source
from stepsight.dataset.configs.drafts import WITH_TABLES, ConfigFile, Given
from stepsight.dataset.configs.formats import format_of, read_configs, write_config
from stepsight.dataset.configs.key_table import ConfigText
from stepsight.dataset.configs.megatron_words import launches
from stepsight.dataset.configs.shell_scripts import read_script
from stepsight.dataset.job.job import Job

_OPTION = re.compile(r"^\s*--([\w-]+)(?: (.*))?$", re.MULTILINE)
_SAID = re.compile(r"(?:^|; )(?:--)?([\w.-]+)(?: ([^;]+))?")  # settings in the words of a key
_PARTS = "parallel", "batch", "model", "optimizer"
_VARIABLE = re.compile(r"[\"']?\$\{?(\w+)\}?[\"']?")
Changes = Mapping[str, tuple[Any, Any]]  # by setting: its value before and after; None: it is not there


def edit_config(path: Path, before: Job, after: Job, name: str, beside: Sequence[Path] = ()) -> ConfigText | None:
    """The configuration that ``before`` was read from with another strategy's settings; line ends stay as they are.

    None if the file has another format than ``name``, as in ``write_config``.  Its text is empty if the changed file,
    with the other files of the run ``beside`` it, does not read as ``after``.
    """
    named, tables = format_of(ConfigFile.open(path))[0], path.suffix in WITH_TABLES
    written = [write_config(job, name) for job in (before, after)]
    if named.partition("-")[0] != name.partition("-")[0] or tables != (written[0].suffix in WITH_TABLES):
        return None
    old, new = (_settings(one, path.suffix) for one in written)
    changes = {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}
    values = {f"cluster.{key}": getattr(after.cluster, key) for key in ("hardware", "nodes", "devices_per_node")}
    stated, notes = dict[str, Any](), list[str]()  # what the command states besides the file is not in the file
    with suppress(JobError):
        own = read_configs([path, *beside], Given(values={"cluster.hardware": after.cluster.hardware}))
        known, parts = {*old, *new}, {part: (getattr(before, part), getattr(after, part)) for part in _PARTS}
        for key, words in own.sources.items():  # what says the same under another name
            differs = len({getattr(of, key.partition(".")[2], None) for of in parts.get(key.partition(".")[0], ())}) > 1
            said = _SAID.findall(words) if differs else []
            changes |= {name: (value or True, None) for name, value in said if name not in known}
        stated, nodes = _settings(write_config(own.job, name), path.suffix), own.mapped.get("cluster.nodes")
        if nodes not in (None, after.cluster.nodes):
            notes.append(f"{own.sources['cluster.nodes']} stays: the strategy is for {after.cluster.nodes} nodes")
    text, lacking = "", None
    with suppress(JobError), TemporaryDirectory() as folder:  # else the changed file states no job
        copy = Path(folder) / path.name
        for _ in range(2):  # once more with keys whose default depends on a changed one
            text = (_of_tables if tables else _of_words)(_source(path), changes, path)
            copy.write_bytes(text.encode())
            back = read_configs([copy, *beside], Given(values=values))
            same = _settings(write_config(back.job, name), path.suffix)
            found = {key: (same.get(key), new.get(key)) for key in {**same, **new} if same.get(key) != new.get(key)}
            lacking = {key: of for key, of in found.items() if key in changes or of[0] != stated.get(key)}
            changes |= lacking
        notes += [line for line in back.ignored if " launches: " in line]
    if lacking:
        notes.append(f"{path} states {', '.join(lacking)} where it cannot be changed, as in a quoted text")
    return ConfigText(text=text if lacking == {} else "", suffix=path.suffix, notes=tuple(notes))


def diff_text(path: Path, out: Path, text: str) -> str:
    """The difference between a user's file and its changed text."""
    old, new = (each.replace("\r\n", "\n").splitlines(keepends=True) for each in (_source(path), text))
    return "".join(unified_diff(old, new, str(path), str(out), n=0))


def _source(path: Path) -> str:
    """The text of a configuration with its own line ends."""
    read_source(path)
    return path.read_bytes().decode()


def _settings(written: ConfigText, suffix: str) -> dict[str, Any]:
    """Settings of a written configuration, by name, but for a vocabulary, which is padded by the strategy."""
    tables, text = suffix in WITH_TABLES, written.text
    found = flat(parse_tables(text, suffix)) if tables else {key: value or True for key, value in _OPTION.findall(text)}
    return {name: value for name, value in found.items() if not re.search("vocab.size", name)}


def _masked(text: str, path: Path) -> str:
    """A script of the same length, in which comments and launches other than the one that is read are blank."""
    hidden = [found.span() for found in re.finditer(r"(?<!\S)#[^\r\n]*", text)]
    with suppress(JobError):  # a file of arguments
        found, number = launches(read_script(text.replace("\r\n", " \n"), folder=path.parent))
        kept, others = list(found.values())[number : number + 1], [*found.values()]
        hidden += [place for places in others for place in places if places not in kept and place not in kept[0]]
    for start, end in hidden:
        text = text[:start] + re.sub(r"\S", " ", text[start:end]) + text[end:]
    return text


def _of_words(text: str, changes: Changes, path: Path) -> str:
    """Options of a script or a file of arguments; a value that is a variable changes where the variable is set."""
    for name, (old, new) in changes.items():
        seen = _masked(text, path)
        value = "" if True in (old, new) else r"(=|\s+)(\"[^\"\s]*\"|'[^'\s]*'|[^\s\\)\"']+)"
        found = re.search(rf"(?<![\w-])--{name}(?![\w-]){value}", seen)
        anchor = re.search(r"(?<![\w-])--micro-batch-size(?=[= ])", seen) or re.search(r"(?<![\w-])--(?=\w)", seen)
        if found is None and anchor and new is not None:
            words = f"--{name} " if new is True else f"--{name} {new} "
            text = text[: anchor.start()] + words + text[anchor.start() :]
        elif found and new is None:
            text = text[: found.start()] + text[found.end() :].removeprefix(" ")
        elif found and new is not True:
            variable = _VARIABLE.fullmatch(found[2])
            line = rf"(?m)^[ \t]*(?:export[ \t]+)?{variable[1]}=(.*)$" if variable else "(?!)"
            places = list(re.finditer(line, text))
            if len(places) == 1 and (plain := re.match(r"[\w.]+(?=[ \t]*(?:#.*)?\r?$)", places[0][1])):
                start = places[0].start(1)
                text = f"{text[:start]}{new}{text[start + plain.end() :]}"
            else:
                text = text[: found.start(2)] + str(new) + text[found.end(2) :]
    return text


def _of_tables(text: str, changes: Changes, path: Path) -> str:
    """Values of TOML, YAML or JSON; new ones come first in their table."""
    suffix, end_of_line = path.suffix, "\r\n" if "\r\n" in text else "\n"
    equals = "=" if suffix == ".toml" else ":"
    for name, (_, new) in changes.items():
        *outer, key = name.split(".")
        value = new if isinstance(new, str) and suffix in (".yaml", ".yml") else json.dumps(new)
        value_of = r"(\[[^\]]*\]|[^#\r\n,}]*?)(?=[ \t]*(?:[,}#\r]|$))"
        words = rf"(?m)((?:^|[{{,])[ \t]*\"?{re.escape(key)}\"?[ \t]*{equals}[ \t]*){value_of}"
        header = re.search(rf"(?m)^\[{re.escape('.'.join(outer))}\][^\n]*\n", text) if suffix == ".toml" else None
        start = header.end() if header else 0
        end = re.compile(r"(?m)^\[").search(text, start) if header else None
        found = re.compile(words).search(text, start, end.start() if end else len(text))
        if found:
            text = text[: found.start()] + ("" if new is None else f"{found[1]}{value}") + text[found.end() :]
        elif new is not None and (header or (not outer and suffix in (".yaml", ".yml"))):
            text = f"{text[:start]}{key}{' =' if header else ':'} {value}{end_of_line}{text[start:]}"
        elif new is not None and outer and (table := re.search(rf'"{re.escape(outer[-1])}"\s*:\s*{{(?=\s*")', text)):
            text = f'{text[: table.end()]}"{key}": {value}, {text[table.end() :].lstrip()}'
    return text
