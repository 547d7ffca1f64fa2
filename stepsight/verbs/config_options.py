"""What users state beside configuration files, on the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepsight.dataset.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.dataset.configs.drafts import Given


def given_of(
    hardware: str = "",
    nodes: int | None = None,
    devices_per_node: int | None = None,
    *,
    framework: str = "",
    given: Sequence[str] = (),
    define: Sequence[str] = (),
    pick: str = "",
) -> Given:
    """What a verb's options state.

    Raises:
        StepsightError: If a ``KEY=VALUE`` is none.
    """
    from stepsight.dataset.configs.drafts import Given

    values: dict[str, Any] = {}
    stated = {"cluster.hardware": hardware or None, "cluster.nodes": nodes, "framework": framework or None}
    stated["cluster.devices_per_node"] = devices_per_node
    values |= {key: value for key, value in stated.items() if value is not None}
    values |= {key: _value(text) for key, text in (_pair("--set", pair) for pair in given)}
    return Given(values=values, variables=dict(_pair("--define", pair) for pair in define), pick=pick)


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise StepsightError(f"{option} must be KEY=VALUE, got {text!r:.80}")
    return key.strip(), value


def _value(text: str) -> Any:
    """A value as TOML writes it; a text may stand without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
