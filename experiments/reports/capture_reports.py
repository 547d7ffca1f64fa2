"""Texts about captured scripts: counts of each rank, and differences between two captures."""

from __future__ import annotations

from typing import Any

from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.predictor.prediction_views import seconds_text


def capture_text(told: dict[str, Any]) -> str:
    """A captured script as text."""
    lines = [f"script     {told['script']}: {_world(told)}"]
    for rank in told["ranks"]:
        phases = ", ".join(f"{count} {phase}" for phase, count in rank["ops_by_phase"].items())
        lines += [
            "",
            f"rank {rank['rank']}: {rank['ops']} ops ({phases}), {scaled(rank['flops'], _FLOP)}, "
            f"peak memory {scaled(rank['peak_bytes'], _BYTES)}, streams {', '.join(rank['streams'])}",
            *_collectives(rank["collectives"]),
            table(["op", "count"], [[kind, Number(count, 0)] for kind, count in rank["ops_by_kind"].items()]),
        ]  # fmt: skip
        lines += [f"warning: {text}" for text in rank["warnings"]]
    if "out" in told:
        lines.append(f"\nwrote {told['out']}")
    return "\n".join(lines)


def _world(told: dict[str, Any]) -> str:
    """How many ranks there are, and how many nodes share them."""
    world, local = told["world_size"], told["devices_per_node"]
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return f"{ranks}, {local} on each node" if world > local else f"{ranks} on one node"


def _collectives(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no collectives"]
    cells = [
        [c["kind"], c["group"], Number(c["group_size"], 0), scaled(c["num_bytes"], _BYTES), Number(c["count"], 0)]
        for c in rows
    ]
    return [table(["collective", "group", "ranks", "bytes each", "count"], cells)]


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """A number with the largest unit that makes it at least one."""
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:.0f} {unit}" if size == 1 else f"{value / size:.2f} {unit}"


_FLOP = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP"))
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def captures_differ(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Differences of two captures, rank by rank: of FLOP, memory, ops by kind, and collectives."""
    found = []
    for left, right in zip(one["ranks"], other["ranks"], strict=False):
        kinds = sorted(left["ops_by_kind"].keys() | right["ops_by_kind"].keys())
        counts = {kind: (left["ops_by_kind"].get(kind, 0), right["ops_by_kind"].get(kind, 0)) for kind in kinds}
        mine, theirs = _by_signature(left), _by_signature(right)
        collectives = [
            {**dict(zip(_SIGNATURE, key, strict=True)), "counts": [mine.get(key, 0), theirs.get(key, 0)]}
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key, 0) != theirs.get(key, 0)
        ]
        found.append(
            {
                "ranks": [left["rank"], right["rank"]],
                "flops": [left["flops"], right["flops"]],
                "peak_bytes": [left["peak_bytes"], right["peak_bytes"]],
                "ops_by_kind": {kind: list(pair) for kind, pair in counts.items() if pair[0] != pair[1]},
                "collectives": collectives,
            }
        )
    return {"scripts": [one["script"], other["script"]], "ranks": found}


_SIGNATURE = ("kind", "group_size", "num_bytes")


def _by_signature(rank: dict[str, Any]) -> dict[tuple[Any, ...], int]:
    found: dict[tuple[Any, ...], int] = {}
    for row in rank["collectives"]:
        key = tuple(row[name] for name in _SIGNATURE)
        found[key] = found.get(key, 0) + row["count"]
    return found


def difference_text(told: dict[str, Any]) -> str:
    """The differences as text."""
    lines = [f"A: {told['scripts'][0]}", f"B: {told['scripts'][1]}"]
    for rank in told["ranks"]:
        rows: list[list[str | Number]] = [["FLOP", *(scaled(value, _FLOP) for value in rank["flops"])]]
        rows += [["peak memory", *(scaled(value, _BYTES) for value in rank["peak_bytes"])]]
        rows += [[kind, *(Number(value, 0) for value in pair)] for kind, pair in rank["ops_by_kind"].items()]
        rows += [
            [f"{c['kind']} of {scaled(c['num_bytes'], _BYTES)}, {c['group_size']} ranks",
             *(Number(value, 0) for value in c["counts"])]
            for c in rank["collectives"]
        ]  # fmt: skip
        first, second = rank["ranks"]
        lines += ["", table([f"rank {first} of A, {second} of B: what differs", "A", "B"], rows)]
    return "\n".join(lines)


def program_text(told: dict[str, Any]) -> str:
    """The prediction of a captured script as text."""
    whole = told["iteration_time_s"]
    memory, needed = told["memory"], told["memory"]["peak_bytes"] / 1e9
    ranks = ", ".join(map(str, told["ranks"]))
    lines = [
        f"script     {told['job']} on {told['world_size']} x {told['hardware']}, captured ranks {ranks}",
        f"source     {told['source']}",
        f"iteration  {seconds_text(whole)}   interval {seconds_text(told['low_s'])} to {seconds_text(told['high_s'])}",
        table(
            ["where the time goes", "time", "%"],
            [
                [cause, seconds_text(seconds), Number(100 * seconds / whole)]
                for cause, seconds in told["breakdown"].items()
                if seconds > 1e-6 * whole
            ],
        ),
        f"speed      MFU {100 * told['mfu']:.1f} %, HFU {100 * told['hfu']:.1f} %",
        f"memory     {needed:.2f} GB of {memory['capacity_bytes'] / 1e9:.2f} GB on the fullest rank",
    ]
    lines += [f"warning: {text}" for text in told["warnings"]]
    if not memory["fits"]:
        lines.append(f"does not fit: {memory['reason']}")
    if told["unsupported"]:
        share = 100 * told["unsupported_share"]
        lines.append(f"outside    {share:.0f} % of the time was never measured: {told['unsupported'][0]:.100}")
    return "\n".join(lines)
