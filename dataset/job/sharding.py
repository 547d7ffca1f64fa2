"""Sharding of embedding tables: where each table lies, what each rank looks up and exchanges.

Quantities of a rank follow from a table's own, so a placement is a sum of vectors: ``shard_amounts`` has that of one
shard, ``loads_of`` those of all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.caching import cached, hashed_once
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.kinds.op import DTYPE_BYTES

Floats = NDArray[np.float64]
AUTO, TABLE, ROW, COLUMN, TABLE_ROW, REPLICATED = RULES = (
    "auto", "table-wise", "row-wise", "column-wise", "table-row-wise", "data-parallel",
)  # fmt: skip
LOCATIONS = ("hbm", "uvm", "host")
# Elements of a row's state, as (of the row, of each element).
SPARSE_OPTIMIZERS = {"rowwise-adagrad": (1, 0), "adagrad": (0, 1), "sgd": (0, 0), "adam": (0, 2)}
NARROWEST = 32  # elements of a column shard: torchrec's planner makes none that are narrower
INDEX_BYTES = 8
LINK_OVER_MEMORY = 50.0  # a byte over the link to the host takes about as long as this many of the device's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlacement:
    """Where one embedding table lies.

    Attributes:
        name: The table's name.
        kind: ``table-wise``, ``row-wise``, ``column-wise``, ``table-row-wise`` or ``data-parallel``.
        ranks: Ranks of the shards, in order; of ``data-parallel`` none.  A rank may have several.
        location: ``hbm``, ``uvm`` (host memory, with a cache in the device's) or ``host``.
    """

    name: str
    kind: str
    ranks: tuple[int, ...] = ()
    location: str = "hbm"

    @property
    def shards(self) -> int:
        """How many shards the table has; a replica is one."""
        return max(len(self.ranks), 1)


@hashed_once  # amounts of shards are remembered by it, and it may hold thousands of placements
@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """How ranks share the embedding tables of a ``dlrm``; the dense part is replicated.

    Attributes:
        rule: For tables that nothing else places: ``table-wise``, ``row-wise``, ``column-wise``, ``table-row-wise``
            (by rows over the ranks of a node), ``data-parallel``, or ``auto``: small tables are replicated, hot ones
            are split by rows so that no rank has more than its share, others stay whole.
        plan: A JSON file with torchrec's plan, which must have every table.
        location: Where tables lie that no plan places: ``hbm``, ``uvm`` or ``host``.
        cache: Share of a table in ``uvm`` that the device keeps, its most frequent rows.
        replicate_mbytes: With ``auto``: the largest table that is replicated, in megabytes.
        optimizer: Of the tables, fused with their backward: ``rowwise-adagrad``, ``adagrad``, ``sgd`` or ``adam``.
        pipelined: Whether indices of the next batch travel beside this one (torchrec's ``TrainPipelineSparseDist``).
        hierarchical: Whether sums and indices travel within nodes first, and then between devices of equal number on
            each node, in fewer and larger messages (HugeCTR's hierarchical communication).
        partial_rows: Whether ``auto`` and a search may cut a table by rows over some ranks; torchrec cuts over all
            ranks, or over those of a node.
        tables: Placements of single tables, as a plan has them.
    """

    rule: str = AUTO
    plan: str = ""
    location: str = "hbm"
    cache: float = 0.2
    replicate_mbytes: float = 8.0
    optimizer: str = "rowwise-adagrad"
    pipelined: bool = True
    hierarchical: bool = False
    partial_rows: bool = True
    tables: tuple[TablePlacement, ...] = ()


class Lookup(NamedTuple):
    """Lookups of one rank in tables of one type, location and way to shard: one call, as in torchrec 1.8."""

    dtype: str  # of the rows
    dim: int  # of tables of several widths the mean, by what a lookup moves
    location: str  # as in TablePlacement
    indices: int  # rows that are summed
    bags: int  # sums
    distinct: int  # different rows among them
    missed: int  # those of them that the device does not have
    state: int  # elements of the optimizer's state of a row
    tables: int  # how many


@hashed_once
@dataclass(frozen=True)
class RankTables:
    """What the slowest rank does for the tables, for all ranks, in a step."""

    lookups: tuple[Lookup, ...]  # in its shards, for the samples of all ranks
    replicated: tuple[Lookup, ...]  # in replicated tables, for its own samples
    replicated_rows: tuple[int, ...]  # elements of each replicated table
    index_bytes: int  # largest number that a rank sends or receives
    pooled: int  # elements of sums: the same
    in_node: int  # elements of sums that ranks of a node add up first
    parameter_bytes: float  # of the fullest rank's device
    state_bytes: float
    mean_share: float  # mean over ranks of the lookups' bytes, of the slowest rank's
    pipelined: bool  # as in ShardingSpec
    hierarchical: bool
    num_ranks: int  # that exchange
    per_node: int


class Ranks(NamedTuple):
    """Ranks that share tables."""

    num: int
    per_node: int
    samples: int  # of each
    memory_s: float = 5e-13  # seconds of a byte in a device's memory
    near_s: float = 5e-12  # between devices of a node
    far_s: float = 4e-11  # between nodes
    sum_bytes: int = 4  # of an element of the sums that are exchanged
    memory_bytes: float = 0.0  # of a device; 0: unknown
    two_way: float = 0.0  # seconds that a byte takes which is received beside those sent, of its seconds alone


@cached(4096)
def _frequencies(rows: int, zipf: float) -> tuple[Floats, Floats]:
    """Number of rows in bins of ranks, the first rows alone, and the share of the lookups of a row of each."""
    edges = np.unique(np.concatenate([np.arange(0, min(rows, 32) + 1), np.geomspace(1, rows, 96).round()]))
    counts = np.diff(edges)
    middle = np.sqrt((edges[:-1] + 1.0) * edges[1:])
    weight = middle**-zipf
    return counts, weight / (weight @ counts)


@cached(16384)
def distinct_rows(table: TableSpec, lookups: float, kept: float = 0.0) -> float:
    """Expected count of different rows among lookups, without the ``kept`` most frequent share of the table."""
    if table.reuse:
        times = np.array([1.0, 2.0, *(0.75 * 2.0**power for power in range(2, len(table.reuse)))])
        found = lookups * float(np.array(table.reuse) @ (1.0 / times)) / sum(table.reuse)
        return min(found, float(table.rows)) * (1.0 - kept)
    counts, share = _frequencies(table.rows, table.zipf)
    hit = np.clip((kept * table.rows - (np.cumsum(counts) - counts)) / counts, 0.0, 1.0)
    return float((counts * (1.0 - hit)) @ -np.expm1(-lookups * share))


def table_names(tables: Iterable[TableSpec]) -> list[str]:
    """Names of tables; torchrec's DLRM names them by their number."""
    return [table.name or f"t_cat_{number}" for number, table in enumerate(tables)]


def placement_words(places: Iterable[TablePlacement]) -> str:
    """How many tables lie in which way: ``12 table-wise, 2 row-wise over 8``."""
    counts = Counter((place.kind, place.shards, place.location) for place in places)
    return ", ".join(
        f"{count} {kind}" + f" over {shards}" * (shards > 1) + f" in {location}" * (location != "hbm")
        for (kind, shards, location), count in counts.most_common()
    )


def row_state(optimizer: str, dim: int) -> int:
    """Elements of the optimizer's state of a row."""
    of_row, of_element = SPARSE_OPTIMIZERS[optimizer]
    return of_row + of_element * dim


def table_bytes(table: TableSpec, optimizer: str) -> float:
    """Bytes of a table with its optimizer's state."""
    return table.rows * float(table.dim * DTYPE_BYTES[table.precision] + 4 * row_state(optimizer, table.dim))


def shard_lookup(table: TableSpec, kind: str, shards: int, location: str, ranks: Ranks, spec: ShardingSpec) -> Lookup:
    """Lookups in one shard of a table, or in a replica of it."""
    samples = ranks.samples if kind == REPLICATED else ranks.samples * ranks.num
    by_rows = shards if kind in (ROW, TABLE_ROW) else 1
    dim = -(-table.dim // shards) if kind == COLUMN else table.dim
    indices = samples * table.pooling
    distinct = distinct_rows(table, indices)
    kept = {"hbm": 1.0, "uvm": spec.cache, "host": 0.0}[location]
    missed = 0.0 if kept == 1.0 else distinct_rows(table, indices, kept)
    rows, seen, far = (math.ceil(number / by_rows) for number in (indices, distinct, missed))
    return Lookup(table.precision, dim, location, rows, samples, seen, far, row_state(spec.optimizer, dim), 1)


# Quantities of a rank: indices it is sent; elements of sums that it sends to all, and within its node; bytes of memory
# that lookups move, with those over the link as so many more; bytes of parameters and of states on the device, and of
# both on the host; elements of replicas; elements of sums that every rank receives, wherever the shard is; shards by
# rows, and others.
QUANTITIES = 11
INDICES, SUMS, IN_NODE, MOVED, PARAMETERS, STATES, ON_HOST, REPLICAS, RECEIVED, BY_ROWS, OTHERS = range(QUANTITIES)


@cached(65536)
def shard_amounts(table: TableSpec, kind: str, shards: int, location: str, ranks: Ranks, spec: ShardingSpec) -> Floats:
    """Quantities that one shard adds to its rank, shape ``(QUANTITIES,)``; the same array each time."""
    look = shard_lookup(table, kind, shards, location, ranks, spec)
    size = DTYPE_BYTES[table.precision]
    moved = size * look.dim * (look.indices + look.bags + 4.0 * look.distinct) + size * 2.0 * look.state * look.distinct
    moved += LINK_OVER_MEMORY * size * look.dim * 2.0 * look.missed
    share = 1.0 / (shards if kind not in (REPLICATED, TABLE) else 1)
    parameters = share * table.rows * table.dim * size
    states = share * table.rows * 4.0 * row_state(spec.optimizer, table.dim)
    kept = {"hbm": 1.0, "uvm": spec.cache, "host": 0.0}[location]
    sums, in_node = float(look.bags * look.dim), 0.0
    if kind in (ROW, TABLE_ROW) and ranks.num > ranks.per_node and shards % ranks.per_node == 0:
        sums, in_node = sums / ranks.per_node, sums  # ranks of a node add partial sums first, as a reduce-scatter does
    held = kept * parameters, kept * states, (1.0 - kept) * (parameters + states)
    if kind == REPLICATED:
        return np.array([0.0, 0.0, 0.0, moved, *held, float(table.rows * table.dim), 0.0, 0.0, 0.0])
    received = float(ranks.samples * look.dim) / (ranks.per_node if in_node else 1)
    calls = (1.0, 0.0) if kind in (ROW, TABLE_ROW) else (0.0, 1.0)
    return np.array([float(look.indices), sums, in_node, moved, *held, 0.0, received, *calls])


def loads_of(
    tables: Sequence[TableSpec],
    places: Sequence[TablePlacement],
    ranks: Ranks,
    spec: ShardingSpec,
    amounts: Callable[..., Floats] = shard_amounts,
) -> Floats:
    """Quantities of every rank, shape ``(num_ranks, QUANTITIES)``; ``amounts``: of a shard."""
    loads = np.zeros((ranks.num, QUANTITIES))
    for table, place in zip(tables, places, strict=True):
        add_shards(loads, amounts(table, place.kind, place.shards, place.location, ranks, spec), place.ranks)
    return loads


def add_shards(loads: Floats, amounts: Floats, ranks: Sequence[int]) -> None:
    """Add shards of a table to their ranks, a replica to all; negative amounts remove them."""
    if not ranks:
        loads += amounts
        return
    loads[:, RECEIVED] += len(ranks) * amounts[RECEIVED]
    away = amounts.copy()  # a rank does not receive what it sums itself
    away[RECEIVED] = 0.0
    for rank in ranks:
        loads[rank] += away


REPLICA_BYTES = 40.0  # moved for an element of a replicated table: its gradient, casts, and a dense optimizer's step


def table_seconds(loads: Floats, ranks: Ranks, power: float = math.inf) -> Floats:
    """Seconds of a step that placements decide: the slowest rank's lookups, the exchanges, and replicas' gradients.

    Args:
        loads: As from ``loads_of``, shape ``(..., num_ranks, QUANTITIES)``.
        ranks: The ranks.
        power: Of the mean over ranks that counts; infinite: their maximum.
    """
    most = loads.max(axis=-2)
    if power < math.inf:
        scale = np.maximum(most, 1e-30)
        most = scale * ((loads / scale[..., None, :]) ** power).mean(axis=-2) ** (1.0 / power)
    away = 1.0 - ranks.per_node / ranks.num
    far = max(away * ranks.far_s, ranks.per_node / ranks.num * ranks.near_s)
    across = ranks.far_s / ranks.per_node if away else 0.0
    exchanged = far * np.maximum(most[..., SUMS], most[..., RECEIVED]) + ranks.near_s * most[..., IN_NODE]
    replicas = most[..., REPLICAS] * (REPLICA_BYTES * ranks.memory_s + 8.0 * max(ranks.near_s, across))
    seconds: Floats = most[..., MOVED] * ranks.memory_s + 2.0 * ranks.sum_bytes * exchanged + replicas * (ranks.num > 1)
    return seconds


def held_bytes(loads: Floats) -> Floats:
    """Bytes of tables on the fullest rank's device, without the last two axes of ``loads``."""
    held: Floats = (loads[..., PARAMETERS] + loads[..., STATES]).max(axis=-1)
    return held


def host_bytes(loads: Floats, ranks: Ranks) -> float:
    """Bytes of tables in the memory of the fullest host; ``loads``: shape ``(num_ranks, QUANTITIES)``."""
    return float(np.add.reduceat(loads[:, ON_HOST], range(0, ranks.num, ranks.per_node)).max())


def fullest_rank(tables: tuple[TableSpec, ...], spec: ShardingSpec, ranks: Ranks) -> str:
    """The rank whose device holds most of the tables, with their states, and the largest of its shards, in words."""
    places, held = placements_of(tables, spec, ranks), [PARAMETERS, STATES]
    each = loads_of(tables, places, ranks, spec)[:, held].sum(axis=1)
    rank = int(each.argmax())
    own = [
        (table, place) for table, place in zip(tables, places, strict=True) if not place.ranks or rank in place.ranks
    ]
    shards = [(shard_amounts(t, p.kind, p.shards, p.location, ranks, spec)[held].sum(), p) for t, p in own]
    sizes = sorted([(size * max(p.ranks.count(rank), 1) / 1e9, p.name) for size, p in shards], reverse=True)
    largest = ", ".join(f"{name} {size:.1f}" for size, name in sizes[:3])
    return f"rank {rank} has {each[rank] / 1e9:.1f} GB of tables, most in {largest}"


BUFFERED_BYTES = 4e5  # that connections hold: fewer do not slow what comes the other way (fitted: recommendation.md)


def equal_exchange(sent: Floats, received: Floats, ranks: Ranks) -> float:
    """Size of an exchange of equal parts that takes as long as one of unequal parts: of what each rank sends and
    receives, with what it keeps.
    """
    if ranks.num == 1:
        return float(sent.max())
    moved = 1.0 - 1.0 / ranks.num  # the rest is kept
    away, came = moved * sent, received - sent / ranks.num
    held = BUFFERED_BYTES / ranks.sum_bytes if ranks.per_node < ranks.num else 0.0
    beside = ranks.two_way * away.max() / max(away.max() + held, 1.0)
    return float((np.maximum(away, came) + beside * np.minimum(away, came)).max() / (moved * (1.0 + beside)))


def rank_tables(
    tables: tuple[TableSpec, ...], places: tuple[TablePlacement, ...], ranks: Ranks, spec: ShardingSpec
) -> RankTables:
    """The work of the rank whose lookups take longest, and the largest exchanges."""
    loads = loads_of(tables, places, ranks, spec)
    slowest, fullest = int(loads[:, MOVED].argmax()), int((loads[:, PARAMETERS] + loads[:, STATES]).argmax())
    own, replicas = dict[tuple[str, str, bool], list[Lookup]](), dict[tuple[str, str], list[Lookup]]()
    sent_indices, rows = 0.0, list[int]()
    for table, place in zip(tables, places, strict=True):
        look = shard_lookup(table, place.kind, place.shards, place.location, ranks, spec)
        if place.kind == REPLICATED:
            replicas.setdefault((look.dtype, look.location), []).append(look)
            rows.append(table.rows * table.dim)
            continue
        sent_indices += ranks.samples * table.pooling * (place.shards if place.kind == COLUMN else 1)
        call = look.dtype, look.location, place.kind in (ROW, TABLE_ROW)
        own.setdefault(call, []).extend([look] * place.ranks.count(slowest))
    return RankTables(
        lookups=tuple([joined(looks, spec.optimizer) for looks in own.values() if looks]),
        replicated=tuple([joined(looks, spec.optimizer) for looks in replicas.values()]),
        replicated_rows=tuple(rows),
        index_bytes=INDEX_BYTES * math.ceil(max(sent_indices, loads[:, INDICES].max())),
        pooled=math.ceil(equal_exchange(loads[:, SUMS], loads[:, RECEIVED], ranks)),
        in_node=math.ceil(loads[:, IN_NODE].max()),
        parameter_bytes=float(loads[fullest, PARAMETERS]),
        state_bytes=float(loads[fullest, STATES]),
        mean_share=float(loads[:, MOVED].mean() / max(loads[slowest, MOVED], 1e-30)),
        pipelined=spec.pipelined,
        hierarchical=spec.hierarchical,
        num_ranks=ranks.num,
        per_node=ranks.per_node,
    )


def joined(looks: Sequence[Lookup], optimizer: str) -> Lookup:
    """Lookups in several tables in one call."""
    first, (indices, bags, distinct, missed) = looks[0], (sum(column) for column in [*zip(*looks, strict=True)][3:7])
    moved = sum(look.dim * (look.indices + look.bags + 4 * look.distinct) for look in looks)
    step = math.gcd(4, *(look.dim for look in looks))  # FBGEMM's kernels take widths of four elements
    dim = step * round(moved / (indices + bags + 4 * distinct) / step)
    sums = indices, bags, distinct, missed, row_state(optimizer, dim), len(looks)
    return Lookup(first.dtype, dim, first.location, *sums)


# Means of these powers lie between mean and maximum: with a small one, later tables can still fill idle ranks.
_POWERS = (2.0, 4.0, 8.0, 16.0)
_MANY = 2000  # so many tables are balanced by the first greedy placement, and fill the caches of amounts
# Tables fill at most this share of a device if they can: HugeCTR caps them at 60 of 80 GB in its runs for MLPerf.
_FILLED, _TOO_LARGE_S = 0.75, 1e3


@cached(1024)
def placements_of(tables: tuple[TableSpec, ...], spec: ShardingSpec, ranks: Ranks) -> tuple[TablePlacement, ...]:
    """The placement of each table: as it is stated, or by the rule; with ``auto`` the best of a few greedy ones."""
    powers = _POWERS if spec.rule == AUTO and len(tables) <= _MANY else _POWERS[-1:]
    found = [_greedy(tables, spec, ranks, power) for power in powers]
    return min(found, key=lambda one: one[0])[1]


def _greedy(
    tables: tuple[TableSpec, ...], spec: ShardingSpec, ranks: Ranks, power: float
) -> tuple[float, tuple[TablePlacement, ...]]:
    """Seconds and placements; each table, those with most work first, is placed where a mean over ranks is least."""
    stated = {place.name: place for place in spec.tables}
    names, capacity = table_names(tables), _FILLED * ranks.memory_bytes or math.inf
    work = [shard_amounts(table, TABLE, 1, spec.location, ranks, spec)[MOVED] for table in tables]
    loads, found = np.zeros((ranks.num, QUANTITIES)), dict[int, TablePlacement]()
    for at in sorted(range(len(tables)), key=lambda at: (names[at] not in stated, -work[at], at)):
        tried = [stated[names[at]]] if names[at] in stated else []
        for kind, shards in [] if tried else ruled_kinds(tables[at], spec, ranks):
            own = least_busy(loads[:, MOVED], kind, shards, ranks)
            tried.append(TablePlacement(name=names[at], kind=kind, ranks=own, location=spec.location))
        each = np.repeat(loads[None], len(tried), axis=0)
        for more, place in zip(each, tried, strict=True):
            amounts = shard_amounts(tables[at], place.kind, place.shards, place.location, ranks, spec)
            add_shards(more, amounts, place.ranks)
        held = held_bytes(each)
        too_large = _TOO_LARGE_S * held / max(ranks.memory_bytes, 1.0) * (held > capacity)
        best = int((table_seconds(each, ranks, power) + too_large).argmin()) if len(tried) > 1 else 0
        loads, found[at] = each[best], tried[best]
    seconds = float(table_seconds(loads, ranks)) + bool(held_bytes(loads) > capacity) * _TOO_LARGE_S
    return seconds, tuple([found[at] for at in range(len(tables))])


def ruled_kinds(table: TableSpec, spec: ShardingSpec, ranks: Ranks) -> list[tuple[str, int]]:
    """Kinds that a table may have by the rule, with their numbers of shards."""
    columns = (COLUMN, max(1, min(ranks.num, table.dim // NARROWEST)))
    kinds = {TABLE: (TABLE, 1), COLUMN: columns, ROW: (ROW, ranks.num), TABLE_ROW: (TABLE_ROW, ranks.per_node)}
    if spec.rule != AUTO:
        return [kinds.get(spec.rule, (REPLICATED, 0))]
    parts = {ranks.num, *(2**power for power in range(1, ranks.num.bit_length()))}
    whole = [n for n in sorted(parts) if 1 < n <= ranks.num and (n <= ranks.per_node or n % ranks.per_node == 0)]
    if not spec.partial_rows:
        whole = [ranks.num] if ranks.num > 1 else []
    found = [(TABLE, 1), *((ROW, shards) for shards in whole)]
    if not spec.partial_rows and 1 < ranks.per_node < ranks.num:
        found.append(kinds[TABLE_ROW])
    small = table.rows * table.dim * DTYPE_BYTES[table.precision] <= 1e6 * spec.replicate_mbytes
    return [*found, *([(REPLICATED, 0)] if small else [])]


def least_busy(busy: Floats, kind: str, shards: int, ranks: Ranks) -> tuple[int, ...]:
    """The ranks with least work; shards of a table by rows are on one node, or on whole nodes."""
    near = ranks.per_node
    if kind in (ROW, TABLE_ROW) and near < ranks.num:
        each = min(shards, near)
        order = np.argsort(busy.reshape(-1, near), axis=1, kind="stable")[:, :each]
        work = np.take_along_axis(busy.reshape(-1, near), order, axis=1).sum(axis=1)
        nodes = np.argsort(work, kind="stable")[: shards // each]
        return tuple(sorted((order[nodes] + nodes[:, None] * near).ravel().tolist()))
    return tuple(sorted(np.argsort(busy, kind="stable")[:shards].tolist()))
