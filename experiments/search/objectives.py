"""Objectives of a search: time, throughput, cost and energy of an iteration, or of training on a number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.bounded import read_toml
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.hardware.hardware import canonical_hardware, find_hardware
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.record import Seconds

OBJECTIVES = ("iteration_time", "tokens_per_s_per_device", "training_time", "cost", "energy")
ROBUST = INTERVAL, REGRET = "interval", "regret"
TOKENS = 1e9  # tokens, if none are stated
MOST = 1e30
# Board power in watts as the vendors' datasheets state it (V100 2020, A100 2021, A40 2022, H100 2023, L40S 2023, H200
# and B200 2024), without host, network and cooling.
POWER_W: Mapping[str, float] = MappingProxyType(
    {
        "v100-sxm-32gb": 300.0,
        "v100-pcie-32gb": 250.0,
        "a100-sxm-40gb": 400.0,
        "a100-sxm-80gb": 400.0,
        "a100-pcie-40gb": 250.0,
        "a100-pcie-80gb": 300.0,
        "a40-pcie-48gb": 300.0,
        "h100-sxm-80gb": 700.0,
        "h100-pcie-80gb": 350.0,
        "h200-sxm-141gb": 700.0,
        "l40s-pcie-48gb": 350.0,
        "b200-sxm-180gb": 1000.0,
    }
)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The objective of a search.

    Attributes:
        objective: One of ``OBJECTIVES``.  ``training_time``, ``cost`` and ``energy`` are those of training on
            ``tokens``.
        tokens: Tokens to train on.
        critical_batch: Global batch, in sequences, at which training needs twice the tokens that a small batch needs:
            training takes ``tokens * (1 + global_batch / critical_batch)`` (McCandlish et al. 2018, arXiv:1812.06162).
            0: the batch size makes no difference.
        prices: Price of a device-hour by hardware, in any currency.
        power_w: Watts of a device by hardware; overrides ``POWER_W``.
        robust: How prediction errors are taken into account.  False: they are not.  ``interval`` (or True): strategies
            are ranked by the upper end of the prediction interval.  ``regret``: the fastest strategies are ranked by
            how much longer each takes, on average over possible errors, than the one that turns out to be the fastest
            (see ``risk``).

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
        """The relevant seconds of an iteration."""
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
        known = self.power_w.get(job.hardware_name, POWER_W.get(job.hardware_name))
        if known is None:
            facts = find_hardware(job.cluster.hardware)
            known = facts.power_w if facts is not None and facts.power_w else None
        return known

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
        told = dict.fromkeys(("tokens_per_s_per_device", "training_time_s", "cost", "energy_kwh"))
        if seconds is None:
            return {**values, **told}
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
