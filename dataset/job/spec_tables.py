"""Plain tables as the dataclasses of a job, and whether their values have the right types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from stepsight.dataset.base.caching import cached

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


@cached(64)
def _hints(spec: type) -> dict[str, Any]:
    """Types of a dataclass' fields: evaluating them costs more than checking them."""
    return get_type_hints(spec)


def spec_from_table(section: str, spec: type, table: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """One table as its dataclass (None if that is not possible), and everything that is wrong with it."""
    known = {f.name: f for f in fields(spec)}
    problems = [
        f"unknown key {section}.{key!s:.80} (known: {', '.join(sorted(known))})".replace("\n", "\\n")
        for key in sorted(map(str, table))
        if key not in known
    ]
    missing = [name for name, f in known.items() if f.default is f.default_factory and name not in table]
    problems += [f"missing key {section}.{name}" for name in missing]
    if problems:
        return None, problems
    hints = _hints(spec)
    values = {}
    for name, value in table.items():
        values[name], wrong = _converted(f"{section}.{name}", hints[name], value)
        problems += wrong
    built = spec(**values)
    return built, problems or type_problems(section, built)


def _converted(name: str, hint: Any, value: Any) -> tuple[Any, list[str]]:
    """Lists as tuples, tables in them as their dataclasses."""
    if get_origin(hint) is not tuple or not isinstance(value, list | tuple):
        return value, []
    of = get_args(hint)[0]
    if of in _WORDS:
        return tuple(value), []
    out, problems = [], []
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            problems += [] if isinstance(item, of) else [f"{name}[{index}] must be a table, got {item!r:.80}"]
            out.append(item)
            continue
        built, wrong = spec_from_table(f"{name}[{index}]", of, item)
        out.append(built)
        problems += wrong
    return tuple(out), problems


def type_problems(section: str, spec: object) -> list[str]:
    """Fields of a dataclass that do not hold what they must."""
    problems = []
    for name, hint in _hints(type(spec)).items():
        value = getattr(spec, name)
        if hint is Any:
            if not isinstance(value, str | Mapping):
                problems.append(f"{section}.{name} must be a preset's name or a table, got {value!r:.80}")
        elif get_origin(hint) is tuple:
            of = get_args(hint)[0]
            if not isinstance(value, tuple):
                problems.append(f"{section}.{name} must be a list, got {value!r:.80}")
            elif of in _WORDS:
                wrong = [item for item in value if isinstance(item, bool) or not isinstance(item, of)]
                problems += [f"{section}.{name} must hold {_WORDS[of]} each, got {item!r:.80}" for item in wrong[:1]]
            else:
                for index, item in enumerate(value):
                    problems += type_problems(f"{section}.{name}[{index}]", item)
        else:
            allowed = get_args(hint) or (hint,)
            accepted = (*allowed, int) if float in allowed else allowed
            mistaken_bool = isinstance(value, bool) and bool not in allowed  # bool is a subclass of int
            if mistaken_bool or not isinstance(value, accepted):
                words = " or ".join(_WORDS[kind] for kind in allowed if kind in _WORDS)
                problems.append(f"{section}.{name} must be {words}, got {value!r:.80}")
            elif isinstance(value, str) and not value.isprintable():
                problems.append(f"{section}.{name} must be printable, got {value!a:.80}")
    return problems
