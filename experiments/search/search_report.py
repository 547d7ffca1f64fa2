"""The output of ``search``: a dict for ``--json`` with a ``text``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.plots import plot_front, plot_search
from stepsight.experiments.reports.text_table import Number, table
from stepsight.experiments.search.choices import cost_axis
from stepsight.experiments.search.settings import INTERVAL
from stepsight.training.prediction.prediction_views import seconds_text

if TYPE_CHECKING:
    from stepsight.experiments.search.choices import SearchResult


def search_report(job: Job, result: SearchResult, top: int) -> dict[str, Any]:
    """The best strategies, and how far the best one is from the optimum."""
    told = result.to_dict()
    rows = told.pop("choices")[:top]
    too_large = min(result.evaluated, sum(not choice.fits for choice in result.choices))
    several = bool(result.plans or result.skipped)
    lines = [f"{job.name}: {_counts(result, too_large)}"]
    lines += _plans(result, top) if several else [table(*_table(rows))]
    own = told["own"]
    if own is not None:
        fits = "fits" if own["fits"] else "does not fit"
        time = seconds_text(own["iteration_time_s"])
        lines.append(f"the job itself: {time}, {own['memory_bytes'] / 1e9:.2f} GB, {fits}")
    lines.append(_verdict(result))
    lines += _experts(told.get("expert_placement"), result)
    lines += _rivals(result)
    warnings = () if result.own is None or result.own.prediction is None else result.own.prediction.warnings
    lines += [f"warning: {warning}" for warning in warnings]
    return {**told, "too_large": too_large, "top": rows, "text": "\n".join(lines)}


def _counts(result: SearchResult, too_large: int) -> str:
    """The number of strategies, by outcome."""
    excluded = result.legal - result.evaluated
    text = f"{result.legal} legal strateg{'y' if result.legal == 1 else 'ies'}, {result.evaluated} evaluated"
    if too_large:
        text += f" ({too_large} of them too large for the devices' memory)"
    if excluded:
        by_bounds = excluded - result.undecided
        text += f", {by_bounds} excluded by bounds: too slow or too large" if by_bounds else ""
        text += f", {result.undecided} not evaluated" if result.undecided else ""
    return text


def _verdict(result: SearchResult) -> str:
    if not result.any_fits:
        return result.proof
    if result.gap_percent is None:
        return "how far the best is from the optimum is not known"
    better = "is faster" if result.goal.objective == "iteration_time" else f"is better by {result.goal.objective}"
    if result.goal.robust == INTERVAL:
        better += " at the upper end of its interval"
    if result.regrets:
        regret = f"least expected regret of the {len(result.regrets)} fastest ({result.regrets[0]:.2g} %)"
        if result.gap_percent == 0:
            return f"{regret}; it is also the fastest: by this predictor, no other legal strategy that fits {better}"
        return (
            f"{regret}; by this predictor, no legal strategy that fits {better} by more than {result.gap_percent:.2g} %"
        )
    if result.gap_percent == 0:
        return f"optimal: by this predictor, no other legal strategy that fits {better}"
    return f"{result.proof}: by this predictor, no legal strategy that fits {better} by more than this"


def _plans(result: SearchResult, top: int) -> list[str]:
    """The best strategy of each of the ``top`` best scenarios; those on the front of time and cost are marked."""
    front = result.front
    rows = result.to_dict()["plans"]
    known = [("cost", "cost"), ("energy_kwh", "MWh, estimate")]
    shown = [column for column in known if any(row[column[0]] is not None for row in rows)]
    cells = [
        [
            number,
            row["nodes"],
            f"{row['hardware']} {row['fabric']}",
            row["global_batch"],
            row["seq_len"],
            choice.job.name.removeprefix(f"{choice.job.model_name} "),
            seconds_text(row["iteration_time_s"]),
            f"{row['tokens_per_s_per_device']:,.0f}",
            days_text(row["training_time_s"]),
            *(_amount(row[key], key) for key, _ in shown),
            "yes" if row in front else "",
        ]
        for number, (row, choice) in enumerate(zip(rows, result.plans, strict=True), start=1)
    ]
    header = ["#", "nodes", "cluster", "batch", "tokens", "best strategy", "iteration", "tokens/s/device", "training"]
    lines = [table([*header, *(name for _, name in shown), "front"], cells[:top])] if cells else []
    if len(cells) > top:
        lines.append(f"{len(cells) - top} more combinations (--top {len(cells)} prints all)")
    goal = result.goal
    penalty = f" * (1 + batch / {goal.critical_batch:g})" if goal.critical_batch else ""
    lines.append(f"by {goal.objective}; training on {goal.tokens:.4g}{penalty} tokens")
    return [*lines, *(f"skipped: {text}" for text in result.skipped)]


def _amount(value: float | None, key: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:,.1f}" if key == "energy_kwh" else f"{value:,.2f}"


def days_text(seconds: float) -> str:
    """A long time in days, hours or seconds."""
    if seconds >= 86400:
        return f"{seconds / 86400:,.1f} d"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else seconds_text(seconds)


def plot_result(result: SearchResult, path: Path, title: str) -> None:
    """Draw time against memory of all strategies; of several scenarios time against cost, with their front."""
    if result.plans:
        told = result.to_dict()
        plot_front(told["plans"], told["front"], cost_axis(told["plans"]), path, title)
        return
    shown = {id(choice): choice for choice in (*result.choices, result.own) if choice is not None}
    plot_search([choice.to_dict() for choice in shown.values()], path, title)


def _experts(told: dict[str, Any] | None, result: SearchResult) -> list[str]:
    """The gain from placing the best strategy's experts by their loads."""
    if told is None:
        return []
    time, in_order = result.choices[0].timed[0], told["iteration_time_in_order_s"]
    if result.choices[0].job.parallel.ep == 1:
        return ["experts: every rank of the best strategy holds all of them, so their loads make no difference"]
    return [
        f"experts placed by load: the busiest rank computes {told['imbalance']:.3g} times the mean, in their order "
        f"{told['imbalance_in_order']:.3g} times, with which this strategy takes {seconds_text(in_order)} "
        f"({100 * (in_order / time - 1):.1f} % more)"
    ]


def _rivals(result: SearchResult) -> list[str]:
    """Strategies that cannot be distinguished from the best, and what to measure."""
    if not result.goal.robust or not result.any_fits:
        return []
    if not result.rivals:
        return ["no other strategy that was evaluated can be faster: the errors of their differences are too small"]
    cells = [
        [
            rival.choice.job.name.removeprefix(f"{rival.choice.job.model_name} "),
            Number(rival.slower_percent),
            Number(rival.error_percent),
            rival.measure,
        ]
        for rival in result.rivals
    ]
    many = "strategies" if len(cells) > 1 else "strategy"
    head = f"{len(cells)} {many} cannot be told from the best; the kind of op or collective to measure is beside each:"
    return [head, table(["strategy", "slower by %", "error of this, %", "measure"], cells)]


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and cells; columns without information are left out."""
    optional = [axis for axis in ("cp", "ep") if any(row[axis] > 1 for row in rows)]
    ordered = len({row["order"] for row in rows}) > 1
    uneven = any(row["stage_layers"] for row in rows)
    placed = any("imbalance" in row for row in rows)
    regret = any("expected_regret_percent" in row for row in rows)
    header = ["#", "tp", *optional, "pp", "dp", "mb", "schedule", "zero", "recompute", "sp"]
    cells = [
        [
            number,
            *(row[key] for key in ("tp", *optional, "pp", "dp", "micro_batch")),
            _schedule(row),
            f"{row['zero_stage']}/{row['dp_shard']}" if row["dp_shard"] else str(row["zero_stage"]),
            _recompute(row),
            "yes" if row["sequence_parallel"] else "no",
            *([row["order"]] if ordered else []),
            *([_layers(row["stage_layers"])] if uneven else []),
            *([f"{row['imbalance']:.3g}"] if placed else []),
            *_times(row),
            *([_percent(row["expected_regret_percent"])] if regret else []),
            Number(row["memory_bytes"] / 1e9, 2),
            "yes" if row["fits"] else "NO",
        ]
        for number, row in enumerate(rows, start=1)
    ]
    header += [name for name, shown in (("order", ordered), ("layers per stage", uneven), ("busiest", placed)) if shown]
    return [*header, "iteration", "interval", *(["regret %"] if regret else []), "GB", "fits"], cells


def _layers(counts: Sequence[int]) -> str:
    """Layers of each part of the model, as ``11 14*12 13``; even ones as ``even``."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return " ".join(f"{times}*{count}" if times > 1 else str(count) for count, times in runs) or "even"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _schedule(row: dict[str, Any]) -> str:
    if row["pp"] == 1:
        return "-"
    chunks = row["virtual_stages"]
    return f"{row['schedule']} x{chunks}" if chunks > 1 else str(row["schedule"])


def _recompute(row: dict[str, Any]) -> str:
    if row["offload_activations"]:
        return "offload"
    every = row["recompute_every"]
    return f"full/{every}" if row["recompute"] == "full" and every > 1 else str(row["recompute"])


def _times(row: dict[str, Any]) -> list[str]:
    """Iteration and interval; strategies that do not fit were not timed."""
    if row["iteration_time_s"] is None:
        return ["-", "-"]
    return [
        seconds_text(row["iteration_time_s"]),
        f"{seconds_text(row['low_s'])} to {seconds_text(row['high_s'])}",
    ]
