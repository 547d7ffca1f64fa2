"""Settings of measurements, as Python callers and the command line state them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated

from stepsight.dataset.base.errors import CollectError, StepsightError

_AT_LEAST_ONE = ("rounds", "steps", "warmup", "world_size", "devices_per_node", "timeout_s")


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often a run is repeated.

    Attributes:
        rounds: Rounds: each runs every job once, so that drift of the machine becomes visible.
        steps: Timed steps per round, without a profiler.

    Raises:
        StepsightError: If a number is not allowed.
    """

    rounds: int = 3
    steps: int = 4

    def __post_init__(self) -> None:
        for own in fields(self):
            value, least = getattr(self, own.name), int(own.name in _AT_LEAST_ONE)
            if isinstance(value, int | float) and not least <= value < math.inf:
                raise StepsightError(f"{own.name} must be a number >= {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class CollectSettings(Rounds):
    """What is measured of each run, and how often.

    Attributes:
        role: Purpose of the runs. Only runs with the role `train` can train a predictor.
        warmup: Warm-up steps of each round. Default: 2; in a box 1.
        profile_steps: Profiled steps in the last round; times come from all but the last. Default: 4; in a box 0.
        event_seconds: Seconds for measuring all distinct ops and collectives. 0: skip this.
        extra_seconds: Seconds for more rounds of the jobs whose times vary most; for busy machines.
    """

    role: str = "train"
    warmup: int | None = None
    profile_steps: int | None = None
    event_seconds: float = 30.0
    extra_seconds: float = 0.0

    def counts(self, in_box: bool = False) -> dict[str, int]:
        """The numbers of steps and rounds for a plan."""
        usual = {"rounds": 0, "steps": 0, "warmup": 1 if in_box else 2, "profile_steps": 0 if in_box else 4}
        return {name: each if (own := getattr(self, name)) is None else own for name, each in usual.items()}


@dataclass(frozen=True, kw_only=True)
class Emulation(Rounds):
    """The size of an emulated world, the ranks that run, and what is measured.

    Attributes:
        world_size: Ranks of the world.
        ranks: Ranks that run for real, for example 0,8. They exchange values with each other. Default: 0.
        devices_per_node: Ranks that share a node.
        virtual: Use a virtual clock: delays are added up instead of waited for, and streams overlap as on a device.
            Computation is the CPU time of the script's thread plus its sleeps.
        warmup: Steps before the first round.
        timeout_s: Time within which the measured steps must be done.

    Raises:
        StepsightError: If a number is not allowed.
    """

    world_size: int
    ranks: Annotated[tuple[int, ...], "--ranks", "--rank"] = (0,)
    devices_per_node: int = 8
    virtual: bool = False
    warmup: int = 2
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = list(self.ranks)
        if not ranks or ranks != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < self.world_size:
            told = ",".join(map(str, ranks))
            rule = "--ranks must be different numbers from 0 to below --world-size, in ascending order"
            raise CollectError(f"{rule}, got {told!r:.80} and {self.world_size}")


@dataclass(frozen=True, kw_only=True)
class TraceChanges:
    """Changes to a traced step.

    Attributes:
        faster: Divide durations by a factor, for example gemm=1.5; a factor below 1 makes them longer. A name is a kind
            or family of ops, a kind of collective, `communication`, `host`, or part of a kernel's name. Repeatable.
        no_host: The host takes no time.
        cuda_graph: Kernel launches take no time; loading data still does.
        remove_straggler: The slowest rank computes as fast as the median of the others.
        batch: Size of micro-batches relative to the trace, for example 2x.
        replicas: Multiply the number of ranks by this; collectives over all ranks grow with it.
        bucket_mb: Merge gradient all-reduces into buckets of this many MB.
        fabric: Replace the fabric: a name or a file.
        hardware: Replace the device: a name, the beginning of one, or a file.
        on: The traced device, if the trace does not name a known one: a name or a file.
        on_fabric: The traced fabric, if it is not the device's usual one.

    Raises:
        StepsightError: If a factor is not allowed.
    """

    faster: dict[str, float] = field(default_factory=dict)
    no_host: bool = False
    cuda_graph: bool = False
    remove_straggler: bool = False
    batch: float | str = "1x"
    replicas: int = 1
    bucket_mb: float = 0.0
    fabric: str = ""
    hardware: str = ""
    on: str = ""
    on_fabric: str = ""

    def __post_init__(self) -> None:
        for name, factor in self.faster.items():
            if not name.strip() or not 1e-9 < factor < 1e9:
                raise StepsightError(f"faster takes a name and a factor, as in gemm=1.5, got {name!r:.80} and {factor}")
        if not 1e-6 < self.times < 1e6:
            raise StepsightError(f"batch takes a factor > 0, as in 2x, got {self.batch!r:.80}")
        if not 1 <= self.replicas <= 1e6 or not 0 <= self.bucket_mb <= 1e6:
            got = f"{self.replicas} and {self.bucket_mb}"
            raise StepsightError(f"replicas must be 1 to 1,000,000, bucket_mb 0 to 1,000,000, got {got}")

    @property
    def times(self) -> float:
        """How many times as large a micro-batch is; 0: not a number."""
        try:
            return float(str(self.batch).removesuffix("x"))
        except ValueError:
            return 0.0

    @property
    def by_predictor(self) -> bool:
        """Whether the changes need durations of the traced device for other sizes."""
        return self.times != 1.0 or self.replicas != 1 or bool(self.bucket_mb or self.fabric or self.hardware)
