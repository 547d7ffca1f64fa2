"""A draft of a job, with the source of each value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsight.dataset.base.errors import JobError, shorten
from stepsight.dataset.configs.documents import read_tables
from stepsight.dataset.job.rules import MOST_DEVICES
from stepsight.dataset.job.specs import SECTIONS

MOST_NUMBER = 2**63
WHOLE = re.compile("[0-9]{1,18}").fullmatch  # whether a text is a whole number that int takes
WITH_TABLES = (".json", ".toml", ".yaml", ".yml")
# Keys that are filled in where they are 0, so that a configuration's own 0 must be refused before.
_OPEN_AT_0 = (
    *("model.kv_heads", "model.ffn", "model.expert_ffn", "model.head_dim", "parallel.dp", "parallel.dp_shard"),
    *("cluster.nodes", "cluster.devices_per_node", "model.seq_len", "model.vocab"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Values that the user states; they override the configuration files.

    Attributes:
        values: Values by key of a job: ``{"cluster.hardware": "h100-sxm-80gb", "model.seq_len": 4096}``.
        variables: Variables of shell scripts: ``{"NNODES": "16"}``.
        pick: Which of several configurations in a file to read: a function of a Python registry, or the number of a
            launch in a script.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    pick: str = ""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file."""

    path: Path
    tables: Mapping[str, Any]  # of JSON, TOML or YAML; empty for other files
    given: Given = field(default_factory=Given)  # values that the user states

    @classmethod
    def open(cls, path: Path, given: Given | None = None) -> ConfigFile:
        """Read the tables of a file.

        Raises:
            JobError: If its suffix is that of tables, and it holds none.
        """
        tables = read_tables(path) if path.suffix in WITH_TABLES else {}
        return cls(path, tables, given or Given())


class Unknown(str):
    """What a configuration has for a value that it does not tell, as what a command prints; nothing is read from it."""


def named(setting: str, texts: str) -> bool:
    """Whether texts name a setting."""
    return re.search(rf"(?<![\w.-]){re.escape(setting)}(?![\w-])", texts) is not None


@dataclass(slots=True)
class Draft:
    """Values of a job that a reader of a configuration fills.

    Keys of ``run`` are no job's, but follow from a configuration: ``devices`` (of the run), ``replicas``,
    ``replicas_of_shards``, ``accumulation`` (micro-batches of a replica in an iteration), ``local_batch`` (sequences of
    a replica in an iteration), ``flush_batch`` (sequences of a replica between two flushes of the pipeline).
    """

    framework: str = ""  # of the job
    values: dict[str, Any] = field(default_factory=dict)  # by key of the job (model.layers)
    sources: dict[str, str] = field(default_factory=dict)  # by key: the words of the configuration that state it
    reasons: dict[str, str] = field(default_factory=dict)  # by key: why a value is assumed that nothing states
    ignored: list[str] = field(default_factory=list)  # what no key of a job expresses
    settings: dict[str, str] = field(default_factory=dict)  # all settings that were stated, as written, by their name
    told: list[str] = field(default_factory=list)  # the keys that were set, in their order; ignored: of what none does

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The values by section."""
        found: dict[str, dict[str, Any]] = {name: {} for name in (*SECTIONS, "run")}
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            found[section][name] = value
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, as ``model.layers``."""
        return self.values.get(key, default)

    def degree(self, name: str) -> int:
        """A parallel degree, as ``pp``; 1 where nothing states one, or one that cannot be (which the job refuses)."""
        value = self.get(f"parallel.{name}", 1)
        return value if type(value) is int and 0 < value <= MOST_DEVICES else 1

    def drop(self, key: str) -> None:
        """Take back what was set."""
        for table in (self.values, self.sources, self.reasons):
            table.pop(key, None)

    def map(self, key: str, value: Any, source: str) -> None:
        """Set a key to what a configuration states; a later one wins."""
        self.values[key], self.sources[key] = value, source
        self.reasons.pop(key, None)
        self.told.append(key)

    def assume(self, key: str, value: Any, reason: str, because: str = "") -> None:
        """Set a key that nothing states yet; the words of the key ``because`` belong to the reason."""
        if key not in self.values:
            self.values[key] = value
            self.reasons[key] = f"{reason} ({words})" if (words := self.sources.get(because)) else reason
            self.told.append(key)

    def ignore(self, text: str) -> None:
        """Record a setting that no key of a job expresses."""
        self.ignored.append(shorten(text, 160))
        self.told.append("ignored")

    def names(self, setting: str) -> bool:
        """Whether the words of a key, or what is ignored, name a setting."""
        return named(setting, " ".join([*self.sources.values(), *self.reasons.values(), *self.ignored]))

    def choose(self, framework: str, words: str) -> None:
        """Set the framework, which a configuration states."""
        self.framework, self.sources["framework"] = framework, words
        self.told.append("framework")


@dataclass
class Reading:
    """The settings of a configuration while a reader maps them to the keys of a job."""

    draft: Draft
    values: Mapping[str, Any]  # by name; nested tables have names with dots
    shown: Mapping[str, str] = field(default_factory=dict)  # how a setting is written, by name; else as it is
    default: str = "default"  # why a value is assumed that the configuration leaves to the framework
    defaults: Mapping[str, Any] | None = None  # the framework's values of settings that are not stated
    names: tuple[str, ...] = ()  # of the row that is read
    folder: Path = Path()  # of the configuration
    stated: Mapping[str, Any] = field(default_factory=dict)  # how a setting's value is written; else as it is

    def __post_init__(self) -> None:
        self.get, self.degree, self.ignore = self.draft.get, self.draft.degree, self.draft.ignore
        self._stated = {name: value for name, value in self.values.items() if value is not None}
        self._all, self._settled = {**(self.defaults or {}), **self._stated}, set[str]()
        self._looked, self._fresh = list[str](), list[str]()  # settings of a row, and of its next key

    def __contains__(self, name: str) -> bool:
        return name in self._stated

    def settle(self, read: Callable[[Reading], None], key: str) -> None:
        """Read some settings: those that were looked at count as read if they set a key or were ignored.

        The words of ``key``, or else of the last key that was set, then name them all.
        """
        draft, before, ignored = self.draft, len(self.draft.told), len(self.draft.ignored)
        self._looked, self._fresh = [], []
        read(self)
        told = sorted(draft.told[before:], key=key.__eq__)
        found = [(words, name) for name in told for words in (draft.sources, draft.reasons) if name in words]
        texts = " ".join([*(words[name] for words, name in found), *draft.ignored[ignored:]])
        for name in self._looked:
            if not named(self.source(name), texts):
                if not found:
                    continue
                words, last = found[-1]
                words[last] += f"; {self.written(name)}"
            self._settled.add(name)

    def map(self, key: str, value: Any, *names: str, words: str = "") -> None:
        """Set a key of the job by the first of some settings; if none is stated, the value is the framework's default.

        Without settings, ``words`` state the value, or else all settings that were looked at since the last key.
        """
        if not words:
            stated = [name for name in names if name in self._stated][:1] if names else self._fresh
            words, self._fresh = "; ".join(map(self.written, stated)), [] if not names else self._fresh
        if words:
            self.draft.map(key, value, words)
        else:
            self.assume(key, value)

    def assume(self, key: str, value: Any, reason: str = "") -> None:
        """Set a key of the job that nothing states yet, by default to the framework's default."""
        self.draft.assume(key, value, reason or self.default)

    def asked(self, key: str, wanted: str = "") -> Any:
        """The value of a key, or after ``@`` of a setting, as what a row needs: true or false if that is wanted."""
        if not key.startswith("@"):
            return self.draft.framework if key == "framework" else self.get(key)
        return self.flag(key[1:]) if wanted in ("true", "false") else self.take(key[1:])

    def find(self, *names: str) -> str:
        """The first of some settings that has a value; empty if none has."""
        found = next((name for name in names if name in self._stated), "")
        if found and found not in self._looked:
            self._looked.append(found)
            self._fresh.append(found)
        return found or next((name for name in names if self._all.get(name) is not None), "")

    def take(self, *names: str) -> Any:
        """The value of the first of some settings that has one."""
        return self._all.get(self.find(*names))

    def source(self, *names: str) -> str:
        """How the configuration writes the first of some settings that it states."""
        name = next((name for name in names if name in self._stated), names[0])
        return self.shown.get(name, name)

    def number(self, *keys: str, whole: bool = True) -> Any:
        """A number, None where no key has one; a JobError if the value is something else."""
        value = stated = self.take(*keys)
        if value is None or isinstance(value, Unknown) or (value is True and self.source(*keys).startswith("-")):
            return None  # a flag whose value is an unset variable of a script
        for kind in (lambda text: int(text.replace("_", "")), float):
            with suppress(ValueError):
                value = kind(value) if isinstance(value, str) else value
        if isinstance(value, float) and whole and value.is_integer():
            value = int(value)
        wrong = isinstance(value, bool) or not isinstance(value, int if whole else int | float)
        if wrong or abs(value) > MOST_NUMBER or math.isnan(value):
            what = "a whole number" if whole else "a number"
            raise JobError(f"{self.source(*keys)} must be {what}, got {stated!r:.80}")
        return value

    def positive(self, *keys: str, auto: int | None = None, whole: bool = True) -> Any:
        """A number above 0; None where no key has one, or it is ``auto``, with which the framework decides itself."""
        value = self.number(*keys, whole=whole)
        if value is not None and value != auto and value <= 0:
            but = "" if auto is None else f" or {auto}"
            raise JobError(f"{self.source(*keys)} must be a positive number{but}, got {value:g}")
        return None if value == auto else value

    def flag(self, *keys: str) -> bool | None:
        """True or false, None where no key has a value; a JobError if the value is something else."""
        value = self.take(*keys)
        value = int(value) if value in (0, 1) else value
        if value is None or (word := str(value).lower()) in ("true", "false", "yes", "no", "1", "0"):
            return None if value is None else word in ("true", "yes", "1")
        if self.source(*keys).startswith("--"):  # words that follow a flag of a command line
            return True
        raise JobError(f"{self.source(*keys)} must be true or false, got {value!r:.80}")

    def word(self, *keys: str) -> str:
        """A text; empty where no key has a value."""
        value = self.take(*keys)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # the same for all layers
        return "" if value is None or value is True or isinstance(value, Unknown) else str(value)

    def typed(self, key: str, *names: str) -> Any:
        """The value of the first of some settings that has one, of the type of a job's key."""
        section, _, name = key.partition(".")
        kind = str(SECTIONS[section].__annotations__[name]).partition(" ")[0] if section in SECTIONS else "int"
        if kind in ("int", "float"):
            read = self.positive if key in _OPEN_AT_0 or section == "run" else self.number
            return read(*names, whole=kind == "int")
        return self.flag(*names) if kind == "bool" else self.take(*names)

    def copy(self, key: str, *names: str) -> Any:
        """Map a key of the job to the first of some settings that has a value; return the value."""
        value = self.typed(key, *names)
        if value is not None:
            self.map(key, value, *names)
        return value

    def ignore_rest(self) -> None:
        """Record the settings that set nothing, or only what later ones set again; also those without a value."""
        for name in self.values:
            if name not in self._settled or not self.draft.names(self.source(name)):
                self.ignore(self.written(name))
            if name in self._stated:
                self.draft.settings[self.source(name)] = self.written(name)

    def written(self, name: str) -> str:
        """A setting as the configuration writes it, with its value."""
        value, words = self.stated.get(name, self._all.get(name)), self.shown.get(name, name)
        if words.startswith("--") and isinstance(value, bool):  # an option of a command line without a value
            return words
        value = "null" if value is None else str(value).lower() if isinstance(value, bool) else value  # as YAML has it
        return f"{words} {' '.join(map(str, value)) if isinstance(value, list) else value}".strip()
