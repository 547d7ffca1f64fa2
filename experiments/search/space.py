"""The choices of a search: the values of each axis that it combines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.job.specs import AXES, RECOMPUTE
from stepsight.dataset.schedules import SCHEDULES

MOST = 2**31
SPACES: dict[str, dict[str, Any]] = {
    "usual": {},
    "wide": {
        "micro_batches": (1, 2, 3, 4, 6, 8, 12, 16),
        "schedules": (
            *(("1f1b", chunks) for chunks in (1, 2, 3, 4, 5, 6, 8)),
            *((name, chunks) for name in ("looped-bfs", "interleaved-zb") for chunks in (2, 4)),
            *("gpipe", "zb-h1", "zbv"),
        ),
        "cp": (1, 2, 4, 8, 16),
        "zero_stages": (0, 1, 2, 3),
        "recompute_every": (1, 2, 4),
        "dp_shard": (0, 2, 4, 8, 16, 32, 64),
        "offload_activations": (False, True),
        "orders": ("tp-cp-dp-pp", "tp-cp-pp-dp", "tp-dp-cp-pp"),
    },
}
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_stages": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "sequence_parallel": (False, True),
    "offload_activations": (False, True),
}


@dataclass(frozen=True)
class Space:
    """A search space. Choices that are not legal for a model and cluster are skipped.

    Attributes:
        max_tp: Largest tensor-parallel degree; 0: the devices of a node.
        micro_batches: Micro-batch sizes.
        schedules: Names of schedules, or pairs of a name and the number of virtual stages: ``("1f1b", 2)``.
        cp: Context-parallel degrees; a degree is tried if each rank keeps ``MIN_CP_TOKENS`` tokens of a sequence.
        zero_stages, recompute, sequence_parallel: As in a job.
        recompute_every: With full recomputation: recompute every n-th layer; empty: as in the job.
        dp_shard: Numbers of replicas over which ZeRO shards (hybrid sharding); 0 or empty: all.
        offload_activations: As in a job; empty: as in the job that is searched.
        orders: Orders of ranks on the nodes, as ``parallel.order``; empty: as in the job.

    All expert-parallel degrees that divide the experts are tried, and all pipelines whose layers split nearly evenly.
    Equivalent choices are tried once.  So the search leaves out selective recomputation with fused attention (it frees
    nothing), ``gpipe`` with one micro-batch (it is 1F1B), and orders that differ only in axes of degree 1.

    Raises:
        StepsightError: If a value is not allowed.
    """

    max_tp: int = 0
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    schedules: tuple[tuple[str, int] | str, ...] = (("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("1f1b", 4), ("zb-h1", 1))
    cp: tuple[int, ...] = (1, 2, 4, 8)
    zero_stages: tuple[int, ...] = (0, 1, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute_every: tuple[int, ...] = ()
    dp_shard: tuple[int, ...] = ()
    offload_activations: tuple[bool, ...] = ()
    orders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_number(self.max_tp, 0):
            raise StepsightError(f"max_tp of a space must be a whole number >= 0, got {self.max_tp!r:.80}")
        for field in fields(self)[1:]:
            given = getattr(self, field.name)
            if isinstance(given, str | bytes) or not isinstance(given, Iterable):
                raise StepsightError(f"{field.name} of a space must be a list of values, got {given!r:.80}")
            values = [_checked(field.name, value) for value in given]
            if not values and field.default:
                raise StepsightError(f"{field.name} of a space must name one value at least, got none")
            object.__setattr__(self, field.name, tuple(dict.fromkeys(values)))

    @property
    def pipelines(self) -> tuple[tuple[str, int], ...]:
        """The schedules, each with its virtual stages."""
        return tuple(schedule for schedule in self.schedules if not isinstance(schedule, str))

    @classmethod
    def of(cls, value: Space | Mapping[str, Any] | str | Path | None) -> Space:
        """Return a space unchanged, or build one.

        Args:
            value: A ``Space``, its attributes as a dict, ``usual`` (the default), ``wide`` (all axes), or the path of
                a ``.toml`` file with the attributes.

        Raises:
            StepsightError: If no space can be built from it.
        """
        if value is None or isinstance(value, Space):
            return value or cls()
        if isinstance(value, str) and value in SPACES:
            return cls(**SPACES[value])
        if isinstance(value, Mapping):
            return cls._from_dict(value)
        if not str(value).endswith(".toml"):
            raise StepsightError(f"a space must be {', '.join(SPACES)} or the path of a .toml file, got {value!s:.80}")
        try:
            return cls._from_dict(read_toml(Path(value)))
        except OSError as error:
            raise StepsightError(f"cannot read the space {value!s:.200}: {error.strerror}") from None
        except ValueError as error:
            raise StepsightError(f"{value!s:.200}: {error}") from None

    @classmethod
    def _from_dict(cls, values: Mapping[str, Any]) -> Space:
        names = [field.name for field in fields(cls)]
        for key in values:
            if key not in names:
                raise StepsightError(f"a space has {', '.join(names)}, got {key!r:.80}{did_you_mean(str(key), names)}")
        return cls(**values)


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _checked(name: str, value: Any) -> Any:
    """A value of an axis; a schedule without virtual stages has as few as it allows.

    Raises:
        StepsightError: If it is not allowed.
    """
    if name == "schedules":
        return _schedule(value)
    if name in _VALUES:
        good = any(value == choice and type(value) is type(choice) for choice in _VALUES[name])
        rule = f"one of {', '.join(map(str, _VALUES[name]))}"
    elif name == "orders":
        good = isinstance(value, str) and sorted(value.split("-")) == sorted(AXES)
        rule = f"{', '.join(AXES)} once each, joined by '-'"
    else:
        least = 0 if name == "dp_shard" else 1
        good, rule = _is_number(value, least), f"whole numbers >= {least}"
    if not good:
        raise StepsightError(f"{name} of a space must be {rule}, got {value!r:.80}")
    return value


def _schedule(value: Any) -> tuple[str, int]:
    if isinstance(value, str) and value in SCHEDULES:
        return value, SCHEDULES[value].virtual_stages[0]
    if isinstance(value, str):
        raise StepsightError(f"schedules of a space: {SCHEDULES.unknown(value)}")
    pair = tuple(value) if isinstance(value, list) else value
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not _is_number(pair[1], 1):
        raise StepsightError(
            f"schedules of a space must be names, or names with virtual stages, as ('1f1b', 2), got {value!r:.80}"
        )
    name, chunks = pair
    if name not in SCHEDULES:
        raise StepsightError(f"schedules of a space: {SCHEDULES.unknown(name)}")
    if not SCHEDULES[name].allows(chunks):
        raise StepsightError(f"schedule {name} has virtual_stages {SCHEDULES[name].allowed}, got {chunks}")
    return name, chunks
