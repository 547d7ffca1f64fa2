"""What a search is asked: its goal, the scenarios that it compares, its settings, and its space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stepsight.dataset.base.bounded import read_toml, reason
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import read_document
from stepsight.dataset.base.registry import did_you_mean
from stepsight.dataset.job.schedules import SCHEDULES
from stepsight.dataset.job.specs import AXES, RECOMPUTE

if TYPE_CHECKING:
    from stepsight.dataset.job.job import Job

Seconds = tuple[float, float, float]  # predicted iteration time, low and high end of its interval
_COLUMNS = {"energy": "energy_kwh", "training_time": "training_time_s"}  # of ``Goal.objectives``
OBJECTIVES = ("iteration_time", "tokens_per_s_per_device", "training_time", "cost", "energy")
ROBUST = INTERVAL, REGRET = "interval", "regret"
SAMPLERS = ("auto", "enumerate", "tpe", "random")
TOKENS = 1e9  # tokens, if none are stated
LEAST, MOST = 1e-9, 1e30
MOST_SCENARIOS = 1000
MOST_SEED = MOST_SIZE = 2**31  # samplers take 32 bits, and a continued study adds its trials


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The objective of a search.

    Attributes:
        objective: What to minimise: iteration_time, training_time, cost or energy; or tokens_per_s_per_device to
            maximise.
        tokens: Tokens to train on, for training time, cost and energy. With a critical batch: the tokens that a very
            small batch needs.
        critical_batch: Critical batch G, in sequences: training with a global batch of B sequences takes (1 + B / G)
            times the tokens (McCandlish et al. 2018, arXiv:1812.06162). 0: the number of tokens does not depend on the
            batch.
        prices: Price of a device-hour by hardware, in any currency.
        power_w: Watts of a device by hardware; default: what the hardware's facts state (datasheets).
        robust: Take prediction errors into account, and list the strategies that cannot be distinguished from the best.
            interval (or True): rank by the upper end of the interval. regret: rank the 25 fastest by expected regret,
            which is how much longer a strategy takes than the truly fastest one, on average over possible errors.

    Raises:
        StepsightError: If a value is not allowed.
    """

    objective: str = "iteration_time"
    tokens: float = TOKENS
    critical_batch: float = 0.0
    prices: Mapping[str, float] = field(default_factory=dict)
    power_w: Mapping[str, float] = field(default_factory=dict)
    robust: bool | str = False

    def __post_init__(self) -> None:
        if self.robust is True:
            object.__setattr__(self, "robust", INTERVAL)
        if self.robust not in (False, *ROBUST):
            raise StepsightError(f"robust must be one of {', '.join(ROBUST)}, got {self.robust!r:.80}")
        if self.robust == REGRET and self.objective not in ("iteration_time", "tokens_per_s_per_device"):
            raise StepsightError(f"robust {REGRET} is about the iteration time, got objective {self.objective}")
        if self.objective not in OBJECTIVES:
            raise StepsightError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r:.80}")
        numbers = {"tokens": self.tokens, "critical_batch": self.critical_batch or 1.0}
        numbers |= {f"the price of {name}": value for name, value in self.prices.items()}
        numbers |= {f"the power of {name}": value for name, value in self.power_w.items()}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
                none = ", or 0 for no penalty" if name == "critical_batch" else ""
                raise StepsightError(f"{name} must be a number from {LEAST:g} to {MOST:g}{none}, got {value!r:.80}")

    def scale(self, job: Job) -> float:
        """Score of a job over its iteration time; the least score is best.

        Raises:
            StepsightError: If the objective needs a price or a power that is not known.
        """
        if self.objective == "iteration_time":
            return 1.0
        value = self.objectives(job, (1.0, 1.0, 1.0))[_COLUMNS.get(self.objective, self.objective)]
        if value is None:
            what, where = ("price", "prices") if self.objective == "cost" else ("power", "power_w")
            raise StepsightError(f"the {what} of {job.hardware_name} is not known: state it in {where}")
        return 1.0 / value if self.objective == "tokens_per_s_per_device" else float(value)

    def score(self, job: Job, seconds: Seconds) -> float:
        """The value that is compared; the smallest is best."""
        return self.scale(job) * self.judged(seconds)

    def judged(self, seconds: Seconds) -> float:
        """The seconds of an iteration that count: predicted, or the upper end of the interval."""
        return seconds[2] if self.robust == INTERVAL else seconds[0]

    def iterations(self, job: Job) -> float:
        """Iterations of training on ``tokens``."""
        penalty = 1.0 + (job.batch.global_batch / self.critical_batch if self.critical_batch else 0.0)
        return self.tokens * penalty / job.tokens

    def objectives(self, job: Job, seconds: Seconds | None) -> dict[str, Any]:
        """Plain values for tables: the cluster of the job, and all objectives; None: not known.

        ``energy_kwh`` is an estimate: devices at the power that their datasheets state, nothing else.
        """
        from stepsight.dataset.hardware.hardware import find_hardware  # the command line starts without it

        values: dict[str, Any] = {
            "nodes": job.cluster.nodes,
            "devices": job.cluster.num_devices,
            "hardware": job.hardware_name,
            "fabric": job.fabric.name,
            "global_batch": job.batch.global_batch,
            "seq_len": job.model.seq_len,
        }
        if seconds is None:
            return values | dict.fromkeys(("tokens_per_s_per_device", "training_time_s", "cost", "energy_kwh"))
        devices, time_s = job.cluster.num_devices, self.iterations(job) * self.judged(seconds)
        facts, price = find_hardware(job.cluster.hardware), self.prices.get(job.hardware_name)
        power = self.power_w.get(job.hardware_name) or (facts.power_w if facts is not None else None) or None
        return {
            **values,
            "tokens_per_s_per_device": job.tokens / (self.judged(seconds) * devices),
            "training_time_s": time_s,
            "cost": None if price is None else time_s / 3600.0 * devices * price,
            "energy_kwh": None if power is None else time_s / 3600.0 * devices * power / 1e3,
        }


def read_prices(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Read prices of a device-hour and watts of a device, by hardware as a job file names it: the tables
    ``[price_per_device_hour]`` and ``[power_w]`` of a ``.toml`` file, either of which may be absent.
    """
    from stepsight.dataset.hardware.hardware import canonical_hardware

    tables = read_document(path, f"prices {path}")
    names = ("price_per_device_hour", "power_w")
    for name, table in tables.items():
        if name not in names or not isinstance(table, dict):
            raise StepsightError(f"{path} must hold tables {' and '.join(f'[{n}]' for n in names)}, got {name!r:.80}")
    prices, power = ({canonical_hardware(key): value for key, value in tables.get(name, {}).items()} for name in names)
    return prices, power


@dataclass(frozen=True, kw_only=True)
class Scenarios:
    """Clusters, batches and sequence lengths to compare; every combination is a scenario. Empty: as in the job.

    Attributes:
        nodes: Numbers of nodes to compare.
        clusters: Hardware to compare, with its usual fabric, or as HARDWARE@FABRIC: ``a100-sxm-80gb@dgx-a100``. Names
            of presets or paths of ``.toml`` files.
        global_batches: Global batches to compare, in sequences.
        seq_lens: Sequence lengths to compare, in tokens.

    Raises:
        StepsightError: If a value is not allowed.
    """

    nodes: tuple[int, ...] = ()
    clusters: tuple[str, ...] = ()
    global_batches: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def check(name: str, value: Any) -> Any:
            text = name == "clusters"
            if not (isinstance(value, str) and value.partition("@")[0] if text else _is_number(value, 1)):
                words = "hardware, or hardware@fabric" if text else "whole numbers > 0"
                raise StepsightError(f"{name} of scenarios must be {words}, got {value!r:.80}")
            return value

        _check_lists(self, "scenarios", check)
        count = math.prod(max(1, len(values)) for values in vars(self).values())
        if count > MOST_SCENARIOS:
            raise StepsightError(f"scenarios must be <= {MOST_SCENARIOS}, got {count}")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is varied."""
        return not any(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How far a search goes, in which order, and where its study is kept.

    Attributes:
        trials: Stop when the study has this many evaluated strategies; those of earlier searches and of other
            processes count. Default: no limit. If scenarios are compared, the limit is for each of them.
        timeout_s: Stop after this many seconds.
        gap: Stop when the best strategy is proved to be within this many percent of the optimum.
        top: Number of best strategies to find and prove; of combinations, if several are searched.
        sampler: Order in which strategies are predicted. auto: by lower bounds, until the best is proved. enumerate:
            every legal strategy. tpe: Optuna's sampler. random: at random. tpe and random stop after 200 strategies
            unless the number of trials is given.
        seed: Seed of the sampler.
        storage: Study storage: a database URL or the path of a journal file; default: memory. Several searches may
            share a study in SQLite, PostgreSQL or a journal.
        study_name: Name of the study in the storage; an existing study continues.

    Raises:
        StepsightError: If a value is not allowed.
    """

    trials: int | None = None
    timeout_s: float | None = None
    gap: float = 0.0
    top: int = 1
    sampler: str = "auto"
    seed: int = 0
    storage: str | None = None
    study_name: Annotated[str | None, "--study"] = None

    def __post_init__(self) -> None:
        rules: tuple[tuple[str, type, Callable[[Any], bool], str], ...] = (
            ("seed", int, lambda value: 0 <= value <= MOST_SEED, f">= 0 and <= {MOST_SEED}"),
            ("trials", int, lambda value: value >= 1, ">= 1"),
            ("top", int, lambda value: value >= 1, ">= 1"),
            ("timeout_s", float, lambda value: value > 0, "> 0"),
            ("gap", float, lambda value: 0 <= value < math.inf, "a number of percent >= 0"),
        )
        for name, kind, holds, rule in rules:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | kind)):
                raise StepsightError(f"{name} must be a {'whole ' * (kind is int)}number, got {value!r:.80}")
            if value is not None and not holds(value):
                raise StepsightError(f"{name} must be {rule}, got {value}")
        if self.storage is not None and not isinstance(self.storage, str):
            raise StepsightError(f"storage must be a database URL or the path of a journal, got {self.storage!r:.80}")
        if self.sampler not in SAMPLERS:
            raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {self.sampler!r:.80}")
        if self.study_name is not None and self.storage is None:
            raise StepsightError(f"a study is kept in a storage: state storage with the study {self.study_name!r:.80}")


SPACES: dict[str, dict[str, Any]] = read_toml(Path(__file__).with_name("spaces.toml"))
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_stages": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "sequence_parallel": (False, True),
    "offload_activations": (False, True),
    "orders": tuple("-".join(order) for order in itertools.permutations(AXES)),
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
        _check_lists(self, "a space", _checked)

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
            names = [axis.name for axis in fields(cls)]
            for key in value:
                if key not in names:
                    meant = did_you_mean(str(key), names)
                    raise StepsightError(f"a space has {', '.join(names)}, got {key!r:.80}{meant}")
            return cls(**value)
        if not str(value).endswith(".toml"):
            raise StepsightError(f"a space must be {', '.join(SPACES)} or the path of a .toml file, got {value!s:.80}")
        try:
            return cls.of(read_toml(Path(value)))
        except StepsightError as error:
            raise StepsightError(f"{value!s:.200}: {error}") from None
        except (OSError, ValueError) as error:
            raise StepsightError(f"cannot read the space {value!s:.200}: {reason(error)}") from None


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_SIZE


def _check_lists(of: Any, noun: str, check: Callable[[str, Any], Any]) -> None:
    """Turn the lists of a dataclass into tuples of distinct values; ``check`` takes a field's name and a value."""
    for axis in (axis for axis in fields(of) if isinstance(axis.default, tuple)):
        given = getattr(of, axis.name)
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise StepsightError(f"{axis.name} of {noun} must be a list of values, got {given!r:.80}")
        values = tuple(dict.fromkeys(check(axis.name, value) for value in given))
        if not values and axis.default:
            raise StepsightError(f"{axis.name} of {noun} must name one value at least, got none")
        object.__setattr__(of, axis.name, values)


def _checked(name: str, value: Any) -> Any:
    """A value of an axis of a space; a schedule without virtual stages has as few as it allows."""
    if name == "schedules":
        pair = (value, 0) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not _is_number(pair[1], 0):
            rule = "must be names, or names with virtual stages, as ('1f1b', 2)"
            raise StepsightError(f"schedules of a space {rule}, got {value!r:.80}")
        if pair[0] not in SCHEDULES:
            raise StepsightError(f"schedules of a space: {SCHEDULES.unknown(pair[0])}")
        schedule = SCHEDULES[pair[0]]
        if not isinstance(value, str) and not schedule.allows(pair[1]):
            raise StepsightError(f"schedule {pair[0]} has virtual_stages {schedule.allowed}, got {pair[1]}")
        return (value, schedule.virtual_stages[0]) if isinstance(value, str) else pair
    least = 0 if name == "dp_shard" else 1
    good, rule = _is_number(value, least), f"whole numbers >= {least}"
    if name in _VALUES:
        good = any(value == choice and type(value) is type(choice) for choice in _VALUES[name])
        rule = f"{', '.join(AXES)} once each, joined by '-'"
        rule = rule if name == "orders" else f"one of {', '.join(map(str, _VALUES[name]))}"
    if not good:
        raise StepsightError(f"{name} of a space must be {rule}, got {value!r:.80}")
    return value
