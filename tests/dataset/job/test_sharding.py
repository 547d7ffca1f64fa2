from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.base.caching import clear_caches
from stepsight.dataset.job import sharding
from stepsight.dataset.job.model_spec import TableSpec
from stepsight.dataset.job.sharding import (
    MOVED,
    PARAMETERS,
    RULES,
    STATES,
    SUMS,
    Ranks,
    ShardingSpec,
    TablePlacement,
    distinct_rows,
    equal_exchange,
    loads_of,
    placement_words,
    placements_of,
    rank_tables,
    table_bytes,
)

TABLES = tuple(TableSpec(rows=rows, dim=64, pooling=p, zipf=1.0) for rows, p in ((10**6, 20), (10**5, 3), (100, 1)))
EIGHT = Ranks(8, 4, 128)


def test_distinct_rows_of_alike_rows_are_a_closed_form() -> None:
    """Each of ``R`` rows is missed by ``n`` draws with probability ``(1 - 1 / R) ** n``."""
    table = TableSpec(rows=1000, dim=8)
    assert distinct_rows(table, 1000) == pytest.approx(1000 * (1 - (1 - 1e-3) ** 1000), rel=1e-3)


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.2])
def test_distinct_rows_are_those_of_draws(zipf: float) -> None:
    rng, rows, draws = np.random.default_rng(0), 5000, 3000
    share = np.arange(1, rows + 1) ** -zipf
    seen = [len(np.unique(rng.choice(rows, draws, p=share / share.sum()))) for _ in range(5)]
    assert distinct_rows(TableSpec(rows=rows, dim=8, zipf=zipf), draws) == pytest.approx(np.mean(seen), rel=0.02)


def test_a_histogram_of_reuse_counts_rows() -> None:
    """Lookups of rows that a batch looks up four times are of a quarter as many rows."""
    assert distinct_rows(TableSpec(rows=10**6, dim=8, reuse=(0.5, 0.0, 0.5)), 1200) == pytest.approx(600 + 200)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "data-parallel"])
def test_every_rule_places_each_byte_once(rule: str) -> None:
    spec = ShardingSpec(rule=rule, replicate_mbytes=0.0)
    places = placements_of(TABLES, spec, EIGHT)
    loads = loads_of(TABLES, places, EIGHT, spec)
    held = loads[:, PARAMETERS].sum() + loads[:, STATES].sum()
    extra = 4 * sum(t.rows * (len(p.ranks) - 1) for t, p in zip(TABLES, places, strict=True) if p.kind == "column-wise")
    assert held == pytest.approx(sum(table_bytes(table, spec.optimizer) for table in TABLES) + extra, abs=4 * 1.1e6 * 2)


def test_replicas_look_up_their_own_samples_and_exchange_nothing() -> None:
    spec = ShardingSpec(rule="data-parallel")
    loads = loads_of(TABLES, placements_of(TABLES, spec, EIGHT), EIGHT, spec)
    assert not loads[:, SUMS].any() and np.ptp(loads[:, MOVED]) == 0


def test_auto_is_balanced_better_than_whole_tables() -> None:
    found = {}
    for rule in ("auto", "table-wise"):
        spec = ShardingSpec(rule=rule)
        found[rule] = rank_tables(TABLES, placements_of(TABLES, spec, EIGHT), EIGHT, spec).mean_share
    assert found["auto"] > 2 * found["table-wise"]


def test_a_larger_cache_misses_fewer_rows() -> None:
    spec = ShardingSpec(rule="table-wise", location="uvm")
    missed = []
    for cache in (0.0, 0.1, 0.5):
        own = replace(spec, cache=cache)
        missed.append(rank_tables(TABLES, placements_of(TABLES, own, EIGHT), EIGHT, own).lookups[0].missed)
    assert missed[0] > missed[1] > missed[2] > 0


def test_auto_fills_no_device_while_others_have_room() -> None:
    """Tables that are too large for a device with little work are split none the less."""
    tables = tuple(TableSpec(rows=10**6, dim=64, pooling=p) for p in (1, 1, 1))
    spec, ranks = ShardingSpec(replicate_mbytes=0.0), Ranks(4, 4, 64, memory_bytes=300e6)
    loads = loads_of(tables, placements_of(tables, spec, ranks), ranks, spec)
    assert (loads[:, PARAMETERS] + loads[:, STATES]).max() <= 0.75 * 300e6


def test_work_grows_with_the_number_of_tables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as many tables need ten times as many amounts of shards, not more: none is computed a second time."""
    counts = []
    for number in (400, 4000):
        tables = tuple(TableSpec(rows=1000 + at, dim=64, pooling=2) for at in range(number))
        monkeypatch.setattr(sharding, "_MANY", 1000)
        clear_caches()
        placements_of(tables, ShardingSpec(), EIGHT)
        counts.append(sharding.shard_amounts.cache_info().misses / number)  # type: ignore[attr-defined]
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


def test_placements_are_told_by_kind_and_number() -> None:
    places = placements_of(TABLES, ShardingSpec(rule="row-wise"), EIGHT)
    one = TablePlacement(name="x", kind="table-wise", ranks=(0,), location="uvm")
    assert placement_words([*places, one]) == "3 row-wise over 8, 1 table-wise in uvm"


def test_unequal_exchanges_take_as_long_as_equal_ones_of_the_largest_or_of_both_directions() -> None:
    """Links carry the larger direction while they carry the other; a core copies what leaves and what arrives."""
    parts = np.array([1.0, 3.0])
    sent, received, two = 2 * parts, np.full(2, parts.sum()), Ranks(2, 2, 64)
    assert equal_exchange(sent, received, two) == 6.0
    assert equal_exchange(sent, received, two._replace(two_way=1.0)) == 4.0
    assert equal_exchange(sent, received, two._replace(two_way=0.5)) == pytest.approx(2 * (3 + 0.5 * 1) / 1.5)
    alike = np.full(8, 5.0)
    assert equal_exchange(alike, alike, Ranks(8, 8, 64, two_way=0.7)) == pytest.approx(5.0)


def test_stated_placements_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard is remembered by its sharding, whose placements are not hashed again for every table."""
    tables = tuple(TableSpec(rows=1000 + at, dim=64) for at in range(300))
    names = [f"t_cat_{at}" for at in range(300)]
    stated = tuple(TablePlacement(name=name, kind="table-wise", ranks=(0,)) for name in names)
    hashed, own = [], TablePlacement.__hash__
    monkeypatch.setattr(TablePlacement, "__hash__", lambda place: hashed.append(place) or own(place))
    spec = ShardingSpec(tables=stated)
    loads_of(tables, placements_of(tables, spec, EIGHT), EIGHT, spec)
    assert len(hashed) <= 300


def test_tables_of_all_widths_are_one_call() -> None:
    """A lookup in them moves as much as they do; tables by rows are another call, as torchrec groups them."""
    tables = tuple(TableSpec(rows=10**5, dim=dim, pooling=4) for dim in (32, 64, 128))
    spec = ShardingSpec(rule="table-wise", replicate_mbytes=0.0)
    places = tuple(TablePlacement(name=str(at), kind="table-wise", ranks=(0,)) for at in range(3))
    (look,) = rank_tables(tables, places, EIGHT, spec).lookups
    assert look.tables == 3 and look.dim == 76  # (32 + 64 + 128) / 3, of four elements
    places = (*places[:2], TablePlacement(name="2", kind="row-wise", ranks=tuple(range(8))))
    assert [each.tables for each in rank_tables(tables, places, EIGHT, spec).lookups] == [2, 1]
