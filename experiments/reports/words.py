"""Words of the field for keys of files and answers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

_WORDS: Mapping[str, str] = tomllib.loads(resources.files(__package__).joinpath("words.toml").read_text("utf-8"))


def words(key: str) -> str:
    """A key as people say it: ``ZeRO stage`` for ``parallel.zero_stage``."""
    return _WORDS.get(key) or key.rpartition(".")[2].replace("_", " ").capitalize()


def shown(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "-"
    return "-" if value is None or value == "" else str(value)
