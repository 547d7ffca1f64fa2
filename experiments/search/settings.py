"""What a search is asked: its goal, the scenarios that it compares, and its settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.errors import JobError, StepsightError

if TYPE_CHECKING:
    from stepsight.dataset.job.job import ClusterSpec, Job

Seconds = tuple[float, float, float]  # predicted iteration time, low and high end of its interval
OBJECTIVES = ("iteration_time", "tokens_per_s_per_device", "training_time", "cost", "energy")
ROBUST = INTERVAL, REGRET = "interval", "regret"
SAMPLERS = ("auto", "enumerate", "tpe", "random")
TOKENS = 1e9  # tokens, if none are stated
MOST = 1e30
MOST_SCENARIOS = 1000
MOST_SEED = 2**31  # samplers take 32 bits, and a continued study adds its trials


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
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
                rule = "a number of sequences > 0, or 0 for no penalty" if name == "critical_batch" else "a number > 0"
                raise StepsightError(f"{name} must be {rule}, got {value!r:.80}")

    def scale(self, job: Job) -> float:
        """Score of a job over its iteration time; the least score is best.

        Raises:
            StepsightError: If the objective needs a price or a power that is not known.
        """
        devices, iterations = job.cluster.num_devices, self.iterations(job)
        if self.objective == "iteration_time":
            return 1.0
        if self.objective == "tokens_per_s_per_device":
            return devices / job.tokens
        if self.objective == "training_time":
            return iterations
        known = self.price(job) if self.objective == "cost" else self.power(job)
        if known is None:
            what, where = ("price", "prices") if self.objective == "cost" else ("power", "power_w")
            raise StepsightError(f"the {what} of {job.hardware_name} is not known: state it in {where}")
        return iterations * devices * known

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

    def price(self, job: Job) -> float | None:
        """Price of a device-hour; None: not known."""
        return self.prices.get(job.hardware_name)

    def power(self, job: Job) -> float | None:
        """Watts of a device; None: not known."""
        from stepsight.dataset.hardware.hardware import find_hardware  # the command line starts without it

        facts = find_hardware(job.cluster.hardware)
        return self.power_w.get(job.hardware_name) or (facts.power_w if facts is not None else None) or None

    def objectives(self, job: Job, seconds: Seconds | None) -> dict[str, Any]:
        """Plain values for tables: the cluster of the job, and all objectives; None: not known.

        ``energy_kwh`` is an estimate: devices at the power that their datasheets state, nothing else.
        """
        values: dict[str, Any] = {
            "nodes": job.cluster.nodes,
            "devices": job.cluster.num_devices,
            "hardware": job.hardware_name,
            "fabric": job.fabric.name,
            "global_batch": job.batch.global_batch,
            "seq_len": job.model.seq_len,
        }
        if seconds is None:
            unknown = ("tokens_per_s_per_device", "training_time_s", "cost", "energy_kwh")
            return {**values, **dict.fromkeys(unknown)}
        devices, time_s = job.cluster.num_devices, self.iterations(job) * self.judged(seconds)
        price, power = self.price(job), self.power(job)
        return {
            **values,
            "tokens_per_s_per_device": job.tokens / (self.judged(seconds) * devices),
            "training_time_s": time_s,
            "cost": None if price is None else time_s / 3600.0 * devices * price,
            "energy_kwh": None if power is None else time_s / 3600.0 * devices * power / 1e3,
        }


def read_prices(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Read prices of a device-hour, and watts of a device, by hardware.

    Args:
        path: A ``.toml`` file with a table ``[price_per_device_hour]`` and, if wanted, ``[power_w]``; keys are names
            of hardware, as a job file takes them.

    Raises:
        StepsightError: If the file cannot be read, or holds something else.
    """
    from stepsight.dataset.hardware.hardware import canonical_hardware

    try:
        tables = read_toml(path)
    except OSError as error:
        raise StepsightError(f"cannot read prices {path}: {error.strerror}") from None
    except ValueError as error:
        raise StepsightError(f"{path} is not valid TOML: {error}") from None
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
        for own in fields(self):
            values = getattr(self, own.name)
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise StepsightError(f"{own.name} of scenarios must be a list of values, got {values!r:.80}")
            for value in values:
                text = own.name == "clusters"
                whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
                if not (isinstance(value, str) and value.partition("@")[0] if text else whole):
                    words = "hardware, or hardware@fabric" if text else "whole numbers > 0"
                    raise StepsightError(f"{own.name} of scenarios must be {words}, got {value!r:.80}")
            object.__setattr__(self, own.name, tuple(dict.fromkeys(values)))
        if self.count > MOST_SCENARIOS:
            raise StepsightError(f"scenarios must be <= {MOST_SCENARIOS}, got {self.count}")

    @property
    def count(self) -> int:
        """Number of scenarios."""
        return math.prod(max(1, len(getattr(self, own.name))) for own in fields(self))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is varied."""
        return not (self.nodes or self.clusters or self.global_batches or self.seq_lens)

    def of(self, job: Job) -> Iterator[tuple[str, Job | JobError]]:
        """Each scenario in words, with the job in a legal strategy on it, or the reason why there is none."""
        own = (None,)
        for nodes, named, batch, length in itertools.product(
            self.nodes or own, self.clusters or own, self.global_batches or own, self.seq_lens or own
        ):
            words = f"{nodes or job.cluster.nodes} nodes of {named or job.cluster.hardware}"
            words += f", global batch {batch or job.batch.global_batch}, {length or job.model.seq_len} tokens"
            cluster = job.cluster if nodes is None else replace(job.cluster, nodes=nodes)
            if named is not None:
                hardware, _, fabric = named.partition("@")
                cluster = replace(cluster, hardware=hardware, fabric=fabric)
            try:
                yield words, moved(job, cluster, batch, length)
            except JobError as error:
                yield words, error


def moved(job: Job, cluster: ClusterSpec, global_batch: int | None = None, seq_len: int | None = None) -> Job:
    """Move a job to another cluster, with its own strategy if that is legal there, else with the first legal one.

    Raises:
        JobError: If no strategy is legal, with the rules that the plainest one breaks.
    """
    model = job.model if seq_len is None else replace(job.model, seq_len=seq_len)
    batch = job.batch if global_batch is None else replace(job.batch, global_batch=global_batch)
    one = replace(batch, micro_batch=1)
    devices, own = cluster.num_devices, job.parallel
    plain = replace(
        own, cp=1, ep=1, schedule="1f1b", virtual_stages=1, stage_layers=(), dp_shard=0, sequence_parallel=False
    )
    tried = [(own, batch)]
    tried += [
        (replace(plain, tp=tp, pp=pp), one)
        for pp in range(1, min(devices, model.total_layers) + 1)
        for tp in _powers(cluster.devices_per_node)
        if devices % (tp * pp) == 0
    ]
    reason: JobError | None = None
    for parallel, sized in tried:
        dp = max(1, devices // (parallel.tp * parallel.cp * parallel.pp))
        try:
            return replace(job, model=model, batch=sized, cluster=cluster, parallel=replace(parallel, dp=dp))
        except JobError as error:
            reason = error if reason is None or parallel.tp == parallel.pp == 1 else reason
    assert reason is not None
    raise reason


def _powers(most: int) -> list[int]:
    return [size for size in (2**power for power in range(most.bit_length())) if size <= most]


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
        for name, kind in (("seed", int), ("trials", int), ("top", int), ("timeout_s", float), ("gap", float)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | kind)):
                raise StepsightError(f"{name} must be a {'whole ' * (kind is int)}number, got {value!r:.80}")
        if self.storage is not None and not isinstance(self.storage, str):
            raise StepsightError(f"storage must be a database URL or the path of a journal, got {self.storage!r:.80}")
        if not 0 <= self.seed <= MOST_SEED:
            raise StepsightError(f"seed must be {'>= 0' if self.seed < 0 else f'<= {MOST_SEED}'}, got {self.seed}")
        if self.trials is not None and self.trials < 1:
            raise StepsightError(f"trials must be >= 1, got {self.trials}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise StepsightError(f"timeout_s must be > 0, got {self.timeout_s}")
        if self.top < 1:
            raise StepsightError(f"top must be >= 1, got {self.top}")
        if not 0 <= self.gap < math.inf:
            raise StepsightError(f"gap must be a number of percent >= 0, got {self.gap}")
        if self.sampler not in SAMPLERS:
            raise StepsightError(f"sampler must be one of {', '.join(SAMPLERS)}, got {self.sampler!r:.80}")
        if self.study_name is not None and self.storage is None:
            raise StepsightError(f"a study is kept in a storage: state storage with the study {self.study_name!r:.80}")
