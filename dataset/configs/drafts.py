"""A draft of a job, with the source of each value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepsight.dataset.base.errors import JobError, shorten
from stepsight.dataset.job.rules import MOST_DEVICES
from stepsight.dataset.job.specs import SECTIONS

MOST_NUMBER = 2**63
# Keys that are filled in where they are 0, so that a configuration's own 0 must be refused before.
_OPEN_AT_0 = (
    *("model.kv_heads", "model.ffn", "model.expert_ffn", "model.head_dim", "parallel.dp", "parallel.dp_shard"),
    *("cluster.nodes", "cluster.devices_per_node"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Values that the user states; they override the configuration files.

    Attributes:
        values: Values by key of a job: ``{"cluster.hardware": "h100-sxm-80gb", "model.seq_len": 4096}``.
        variables: Variables of shell scripts: ``{"NNODES": "16"}``.
        pick: Which of several configurations in a file to read, for example a function of a Python registry.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    pick: str = ""


@dataclass(slots=True)
class Draft:
    """Tables of a job that a reader of a configuration fills.

    Attributes:
        framework: Of the job.
        tables: By section.
        sources: By key of the job (``model.layers``): the words of the configuration that state it.
        reasons: By key of the job: why a value is assumed that no configuration states.
        ignored: What no key of a job expresses.
        facts: What follows from a configuration without being a job's key: ``devices`` (of the run), ``accumulation``
            (micro-batches of a replica in an iteration), ``local_batch`` (sequences of a replica in an iteration).
    """

    framework: str = ""
    tables: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in SECTIONS})
    sources: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, as ``model.layers``."""
        section, _, name = key.partition(".")
        return self.tables[section].get(name, default)

    def degree(self, name: str) -> int:
        """A parallel degree, as ``pp``; 1 where nothing states one, or one that cannot be (which the job refuses)."""
        value = self.tables["parallel"].get(name, 1)
        return value if type(value) is int and 0 < value <= MOST_DEVICES else 1

    def map(self, key: str, value: Any, source: str) -> None:
        """Set a key to what a configuration states; a later one wins."""
        section, _, name = key.partition(".")
        self.tables[section][name] = value
        self.sources[key] = source
        self.reasons.pop(key, None)

    def assume(self, key: str, value: Any, reason: str) -> None:
        """Set a key that nothing states yet."""
        section, _, name = key.partition(".")
        if name not in self.tables[section]:
            self.tables[section][name] = value
            self.reasons[key] = reason

    def settle(self, key: str, value: Any, stated: str, default: str) -> None:
        """Set a key to what a configuration states, or to the framework's default where it states nothing.

        Args:
            key: Of the job.
            value: Stated or by default.
            stated: The words of the configuration; empty: it states nothing.
            default: Why the value is assumed then.
        """
        if stated:
            self.map(key, value, stated)
        else:
            self.assume(key, value, default)

    def ignore(self, text: str) -> None:
        """Record a setting that no key of a job expresses."""
        self.ignored.append(shorten(text, 160))

    def values(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Values of some of the job's keys."""
        return {key: self.get(key) for key in keys}


class Settings:
    """Keys and values of a configuration, and which of them a reader has used.

    Args:
        values: By key; nested tables have keys with dots.
        shown: How a key is written in the configuration, by key; else as it is.
    """

    def __init__(self, values: Mapping[str, Any], shown: Mapping[str, str] | None = None) -> None:
        self._values, self._shown = dict(values), dict(shown or {})
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def find(self, *keys: str) -> str:
        """The first of some keys that has a value; empty if none has."""
        self._used.update(keys)
        return next((key for key in keys if self._values.get(key) is not None), "")

    def take(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of some keys that has one."""
        key = self.find(*keys)
        return self._values[key] if key else default

    def stated(self, *keys: str) -> str:
        """How the configuration writes the first of some keys that has a value; empty if none has."""
        return self.source(*keys) if any(self._values.get(key) is not None for key in keys) else ""

    def source(self, *keys: str) -> str:
        """How the configuration writes the first of some keys that has a value."""
        key = next((key for key in keys if self._values.get(key) is not None), keys[0])
        return self._shown.get(key, key)

    def number(self, *keys: str, whole: bool = True) -> Any:
        """A number, None where no key has one.

        Raises:
            JobError: If the value is something else.
        """
        key = self.find(*keys)
        value = self._values[key] if key else None
        if value is None or (value is True and self.source(key).startswith("-")):
            return None  # a flag whose value is an unset variable of a script
        if isinstance(value, str):
            value = _parsed_number(value)
        if isinstance(value, float) and whole and value.is_integer():
            value = int(value)
        wrong = isinstance(value, bool) or not isinstance(value, int if whole else int | float)
        if wrong or abs(value) > MOST_NUMBER or math.isnan(value):
            what = "a whole number" if whole else "a number"
            raise JobError(f"{self.source(key)} must be {what}, got {self._values[key]!r:.80}")
        return value

    def positive(self, *keys: str, auto: int | None = None, whole: bool = True) -> Any:
        """A number above 0; None where no key has one, or it is ``auto``, with which the framework decides itself.

        Raises:
            JobError: If the value is something else.
        """
        value = self.number(*keys, whole=whole)
        if value is None or value == auto:
            return None
        if value <= 0:
            but = "" if auto is None else f" or {auto}"
            raise JobError(f"{self.source(*keys)} must be a positive number{but}, got {value:g}")
        return value

    def flag(self, *keys: str) -> bool | None:
        """True or false, None where no key has a value.

        Raises:
            JobError: If the value is something else.
        """
        value = self.take(*keys)
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "1", "0"):
            return value.lower() in ("true", "yes", "1")
        if value is None or isinstance(value, bool):
            return value
        if value in (0, 1):
            return bool(value)
        if self.source(*keys).startswith("--"):  # words that follow a flag of a command line
            return True
        raise JobError(f"{self.source(*keys)} must be true or false, got {value!r:.80}")

    def word(self, *keys: str) -> str:
        """A text; empty where no key has a value."""
        value = self.take(*keys)
        return "" if value is None or value is True else str(value)

    def copy(self, draft: Draft, pairs: Mapping[str, str]) -> None:
        """Map keys that mean the same, by a table of configuration key to job key; kinds follow the job's key."""
        for key, job_key in pairs.items():
            kind = _kind(job_key)
            number = self.positive if job_key in _OPEN_AT_0 else self.number
            value = self.flag(key) if kind is bool else number(key, whole=kind is int) if kind else self.take(key)
            if value is not None:
                draft.map(job_key, value, self.source(key))

    def left(self) -> list[str]:
        """Keys with values that no reader has used, as text."""
        return [
            self.source(key)
            if self.source(key)[:2] == "--" and value in (True, False)
            # an option of a command line that stands alone
            else f"{self.source(key)} {_shown(value)}".strip()
            for key, value in self._values.items()
            if key not in self._used and value is not None
        ]


def _kind(job_key: str) -> type | None:
    """Type of a job's key: bool, int, float, or None for a text."""
    section, _, name = job_key.partition(".")
    hint = str(SECTIONS[section].__annotations__[name])
    return next(
        (kind for word, kind in (("bool", bool), ("int", int), ("float", float)) if hint.startswith(word)), None
    )


def _parsed_number(text: str) -> Any:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
