"""torchrec's plans as files, tables as files, and the rules of recommendation models and their sharding.

A plan is JSON: by module, by table, the fields of torchrec's ``ParameterSharding``: ``sharding_type``,
``compute_kernel``, ``ranks`` and, if it is there, ``sharding_spec`` with the ``shard_sizes``, ``shard_offsets`` and
``placement`` of each shard.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepsight.dataset.base.bounded import MOST_TABLES, parsing, read_text
from stepsight.dataset.base.errors import JobError
from stepsight.dataset.base.files import preset, read_document
from stepsight.dataset.hardware.hardware import find_hardware
from stepsight.dataset.harness.base.parallel_rules import Rules
from stepsight.dataset.job import sharding
from stepsight.dataset.job.model_spec import ModelSpec, TableSpec

_TYPES, _KERNELS = (preset("job_facts.toml")["torchrec"][key] for key in ("types", "kernels"))
# Fields of ``ModelSpec``.
TABLE_FIELDS = ("tables", "dense_features", "bottom_mlp", "top_mlp", "interaction", "cross_layers", "cross_rank")
_ALONE = {"heads": 1, "vocab": 1, "seq_len": 1}
# Recommendation models by name: ``[model] name = "criteo-multihot-dcnv2"``.
TABLE_MODELS: Mapping[str, dict[str, Any]] = MappingProxyType(preset("table_models.toml"))
MOST_HOST_BYTES = 4e12  # of a node: no host has more
MOST_ROWS, MOST_WIDTH, MOST_NUMBER, MOST_BINS = 2**40, 2**20, 10_000, 40
_PRECISIONS = ("fp32", "fp16", "bf16", "fp8")


def read_plan(path: str | Path) -> tuple[sharding.TablePlacement, ...]:
    """Read torchrec's plan from a JSON file.

    Raises:
        JobError: If it cannot be read, or is no plan.
    """
    return placements_in(read_document(Path(path), f"the plan {path}"), str(path))


def placements_in(plan: Any, path: str) -> tuple[sharding.TablePlacement, ...]:
    """Placements in a plan of plain values; ``path``: where it is from, for messages."""
    found, tables = list[sharding.TablePlacement](), [plan]
    for table in tables:
        for name, value in table.items() if isinstance(table, Mapping) else ():
            if isinstance(value, Mapping) and "sharding_type" in value:
                found.append(_placement(str(name), value, f"{path}, table {str(name)!r:.80}"))
            else:
                tables.append(value)
    if not found:
        raise JobError(f"{path} has no table: a plan has by module and by table its sharding_type and ranks")
    return tuple(found)


def _placement(name: str, entry: Mapping[str, Any], where: str) -> sharding.TablePlacement:
    """One table of a plan; its shards have one size, as far as the table reaches: so they are timed."""
    named, kernel = str(entry.get("sharding_type")), str(entry.get("compute_kernel", "fused"))
    if named not in _TYPES or kernel not in _KERNELS:
        rule = f"sharding_type must be one of {', '.join(_TYPES)} and compute_kernel one of {', '.join(_KERNELS)}"
        raise JobError(f"{where}: {rule}, got {named!r:.40} and {kernel!r:.40}")
    kind, spec, stated = _TYPES[named], entry.get("sharding_spec"), entry.get("ranks")
    held = spec.get("shards") if isinstance(spec, Mapping) else None
    shards = held if isinstance(held, list) else []
    placed = [match for one in shards if (match := re.search(r"rank:(\d+)", str(one)))]
    ranks = [int(match[1]) for match in placed] if placed and len(placed) == len(shards) else stated
    if not isinstance(ranks, list | tuple | None) or any(type(rank) is not int for rank in ranks or ()):
        raise JobError(f"{where}: ranks must be a list of whole numbers, got {ranks!r:.80}")
    if isinstance(stated, list) and {*map(str, stated)} != {*map(str, ranks or ())}:
        raise JobError(f"{where}: ranks and places of shards must agree, got {stated!r:.80}")
    each = [size for one in shards if isinstance(one, Mapping) and (size := one.get("shard_sizes")) is not None]
    sizes = [size[kind == sharding.COLUMN] if isinstance(size, list) and len(size) == 2 else None for size in each]
    numbers = [size for size in sizes if type(size) is int and size >= 0]
    if len(numbers) < len(sizes) or (numbers and numbers != _cut(sum(numbers), numbers[0], len(numbers))):
        raise JobError(f"{where}: shards must be of one size, the last ones smaller, got {sizes!r:.80}")
    own = () if kind == sharding.REPLICATED else tuple(ranks or ())
    return sharding.TablePlacement(name=name, kind=kind, ranks=own, location=_KERNELS[kernel])


def _cut(whole: int, each: int, count: int) -> list[int]:
    """Sizes of shards: torchrec gives each the same until nothing is left."""
    return [max(0, min(each, whole - number * each)) for number in range(count)]


def torchrec_type(place: sharding.TablePlacement, ranks: sharding.Ranks) -> str | None:
    """torchrec's type of a placement; None: it cuts by rows over all ranks or a node alone."""
    if place.kind not in (sharding.ROW, sharding.TABLE_ROW) or (
        place.kind == sharding.ROW and len(place.ranks) == ranks.num
    ):
        return place.kind.replace("-", "_")
    node = place.ranks[0] // ranks.per_node
    of_node = range(node * ranks.per_node, (node + 1) * ranks.per_node)
    return sharding.TABLE_ROW.replace("-", "_") if place.ranks == tuple(of_node) else None


def plan_tables(
    tables: Sequence[TableSpec], places: Sequence[sharding.TablePlacement], ranks: sharding.Ranks, module: str = ""
) -> dict[str, Any]:
    """Placements as torchrec's plan, plain values for JSON.

    Args:
        tables, places: The tables, and where each lies.
        ranks: The ranks that share the tables.
        module: Path of the collection in the model; empty: the model is the collection.
    """
    kernels, found = {location: kernel for kernel, location in reversed(_KERNELS.items())}, dict[str, Any]()
    for table, place in zip(tables, places, strict=True):
        found[place.name] = {
            "sharding_type": torchrec_type(place, ranks) or place.kind.replace("-", "_"),
            "compute_kernel": "dense" if place.kind == sharding.REPLICATED else kernels[place.location],
            "ranks": list(place.ranks),
        }
        count, by_columns, shards, first = len(place.ranks), place.kind == sharding.COLUMN, list[dict[str, Any]](), 0
        whole = table.dim if by_columns else table.rows
        for rank, size in zip(place.ranks, _cut(whole, -(-whole // max(count, 1)), count), strict=True):
            sizes, offsets = ([table.rows, size], [0, first]) if by_columns else ([size, table.dim], [first, 0])
            where = f"rank:{rank}/cuda:{rank % ranks.per_node}"
            shards.append({"shard_sizes": sizes, "shard_offsets": offsets, "placement": where})
            first += size
        if shards:
            found[place.name]["sharding_spec"] = {"shards": shards}
    return {module: found}


def recommendation_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """The table ``[model]`` of a ``dlrm`` with what it leaves open: tables by name, sizes that others do not have."""
    named = TABLE_MODELS.get(model.get("name", "") if isinstance(model.get("name", ""), str) else "", {})
    filled = {**named, **model, "family": "dlrm"}
    tables = filled.get("tables", ())
    if isinstance(tables, str):
        known = TABLE_MODELS.get(tables)
        filled = {**(known or {}), **filled, "tables": known["tables"] if known else read_tables(tables)}
        tables = filled["tables"]
    rows = tables if isinstance(tables, list | tuple) else ()
    dims = [one.get("dim") if isinstance(one, Mapping) else getattr(one, "dim", 0) for one in rows]
    width = max(1, min(MOST_WIDTH, max((dim for dim in dims if type(dim) is int), default=1)))
    filled = {**_ALONE, "bottom_mlp": (512, 256, width), "interaction": "dot", **filled}
    cross = filled.get("cross_layers", ModelSpec.cross_layers) if filled["interaction"] == "dcn-v2" else 1
    return {**filled, "hidden": width, "layers": 1 + cross if type(cross) is int else 1}


def shared_batch(batch: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """The table ``[batch]`` of a ``dlrm``, whose ranks share the global batch evenly where it states nothing else."""
    whole, ranks = batch.get("global_batch"), (cluster.get("nodes", 1), cluster.get("devices_per_node"))
    if "micro_batch" in batch or not all(type(size) is int and size > 0 for size in (whole, *ranks)):
        return dict(batch)
    return {**batch, "micro_batch": max(1, int(whole or 1) // (int(ranks[0]) * int(ranks[1] or 1)))}


def read_tables(path: str | Path) -> list[dict[str, Any]]:
    """Tables from a file: CSV with columns ``rows``, ``dim``, ``pooling`` and more, or TOML or JSON with ``tables``.

    Raises:
        JobError: If it cannot be read.
    """
    path = Path(path)
    if path.suffix == ".csv":
        with parsing(f"cannot read tables from {path}", JobError):
            rows = list(csv.DictReader(read_text(path, "utf-8-sig", MOST_TABLES).splitlines()))
        return [{key: _cell(key, value) for key, value in row.items() if value} for row in rows]
    read = read_document(path, f"the tables {path}")
    inner = read.get("model", read) if isinstance(read, Mapping) else read
    found = inner.get("tables") if isinstance(inner, Mapping) else inner
    if not isinstance(found, list) or not found:
        raise JobError(f"{path} must hold a list of tables with rows and dim, got {read!r:.80}")
    return list(found)


def _cell(key: str, text: str) -> Any:
    kind = {field.name: str(field.type) for field in fields(TableSpec)}.get(key, "str")
    try:
        return int(text) if kind == "int" else float(text) if kind == "float" else text
    except ValueError:
        rule = f"a whole number up to {MOST_ROWS}" if kind == "int" else "a number"
        raise JobError(f"{key} of a table must be {rule}, got {text!r:.40}") from None


def check_tables(rules: Rules, model: ModelSpec) -> None:
    """The rules of a recommendation model."""
    tables, names = model.tables, sharding.table_names(model.tables)
    rules.require(
        0 < len(tables) <= MOST_NUMBER,
        f"model.tables of a dlrm must be 1 to {MOST_NUMBER} tables, each with rows and dim, got {len(tables)}",
    )
    rules.require(len(set(names)) == len(names), f"names of model.tables must differ, got {sorted(names)!s:.80}")
    for name, table in zip(names, tables, strict=True):
        words = f"table {name!r:.80} ({table.rows} x {table.dim})"
        rules.lies(f"{words}: rows", table.rows, 1, MOST_ROWS)
        rules.lies(f"{words}: dim", table.dim, 1, MOST_WIDTH)
        rules.lies(f"{words}: zipf", table.zipf, 0, 10)
        rules.require(
            table.precision in _PRECISIONS,
            f"{words}: precision must be one of {', '.join(_PRECISIONS)}, got {table.precision!r:.40}",
        )
        rules.require(
            table.pooling > 0 and (table.pooling <= table.rows or table.rows < 1),
            f"{words}: pooling (indices of a sample) must be > 0 and <= rows, got {table.pooling}",
        )
        known = not table.reuse or (len(table.reuse) <= MOST_BINS and min(table.reuse) >= 0 < sum(table.reuse))
        rules.require(known, f"{words}: reuse must be shares >= 0 of {MOST_BINS} bins at most, got {table.reuse!s:.80}")
    for key in ("bottom_mlp", "top_mlp"):
        sizes = getattr(model, key)
        right = bool(sizes) and 0 < min(sizes) <= max(sizes) <= MOST_WIDTH
        rules.require(right, f"model.{key} must be sizes from 1 to {MOST_WIDTH}, got {sizes!s:.80}")
    dims, width = sorted({table.dim for table in tables}), (0, *model.bottom_mlp)[-1]
    rules.require(
        model.interaction != "dot" or dims in ([], [width]),
        f"interaction dot needs one dim of all tables, with which bottom_mlp ends (dcn-v2 takes any): got dims "
        f"{dims!s:.80}, and bottom_mlp ends with {width}",
    )


def check_sharding(
    rules: Rules, model: ModelSpec, spec: sharding.ShardingSpec, ranks: sharding.Ranks, hardware: Any
) -> None:
    """The rules of a sharding: every table of a plan is there, on ranks that there are, and fits them somewhere."""
    names = sharding.table_names(model.tables)
    stated, sizes = Counter(place.name for place in spec.tables), dict[str, str]()
    named = dict(zip(names, model.tables, strict=True))
    for name, table in named.items():
        size = sharding.table_bytes(table, spec.optimizer)
        sizes[name] = f"table {name!r:.80} ({table.rows} x {table.dim}, {size:.0f} bytes with its optimizer's state)"
        rules.require(not spec.plan or name in stated, f"the plan {spec.plan!r:.80} misses {sizes[name]}")
        rules.require(stated[name] < 2, f"a plan places each table once, got {stated[name]} times {sizes[name]}")
    strange = sorted(set(stated) - set(names))
    rules.require(
        not strange, f"a plan places tables of the model ({', '.join(names):.200}), got {', '.join(strange):.80}"
    )
    for place in spec.tables if not strange else ():
        count, by_columns = len(place.ranks), place.kind == sharding.COLUMN
        known = place.kind in _TYPES.values() and place.location in sharding.LOCATIONS
        many = {sharding.TABLE: count == 1, sharding.REPLICATED: count == 0}.get(place.kind, count >= 1)
        rules.require(
            known and many and all(0 <= rank < ranks.num for rank in place.ranks),
            f"{sizes[place.name]}: kind must be one of {', '.join(_TYPES.values())}, location one of "
            f"{', '.join(sharding.LOCATIONS)}, and ranks must lie from 0 to {ranks.num - 1}, one for table-wise and "
            f"none for data-parallel, got {place.kind!r:.40}, {place.location!r:.40} and {place.ranks!s:.80}",
        )
        rules.require(
            not by_columns or not many or (count - 1) * -(-named[place.name].dim // count) < named[place.name].dim,
            f"{sizes[place.name]}: each column shard must have a column, got {count} shards",
        )
    facts = find_hardware(hardware)
    places = sharding.placements_of(model.tables, spec, ranks) if not rules else ()
    for table, place in zip(model.tables if places else (), places, strict=True):
        amounts = sharding.shard_amounts(table, place.kind, place.shards, place.location, ranks, spec)
        held = amounts[sharding.PARAMETERS] + amounts[sharding.STATES]
        most = facts.memory_bytes if facts is not None else held
        name = sizes[table.name or place.name]
        advice = ["shard it by rows or columns over more ranks"] if place.shards < ranks.num else []
        advice += ["put it in uvm or host memory" if place.location == "hbm" else "lower sharding.cache"]
        rules.require(
            held <= most,
            f"{name} fits no device: a shard of {held:.0f} bytes as {place.kind} over {place.shards} ranks, a device "
            f"has {most:.0f}; {', or '.join(advice)}",
        )
    if any(place.location != "hbm" for place in places):
        on_host = sharding.host_bytes(sharding.loads_of(model.tables, places, ranks, spec), ranks)
        rules.require(
            on_host <= MOST_HOST_BYTES,
            f"the tables fit no host: {on_host:.0f} bytes lie in the fullest one, of {MOST_HOST_BYTES:.0f}; shard them "
            "over more nodes",
        )
