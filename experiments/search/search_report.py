"""The output of ``search``: a dict for ``--json`` with a ``text``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepsight.dataset.base.files import write_text
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.configs.edits import diff_text, edit_config
from stepsight.dataset.configs.formats import write_config
from stepsight.dataset.job.job import Job
from stepsight.experiments.reports.job_texts import TIGHT, written_text
from stepsight.experiments.reports.plots import plot_front, plot_search
from stepsight.experiments.reports.text_table import Number, table_of
from stepsight.experiments.search.choices import Rival, SearchResult, cost_axis
from stepsight.experiments.search.search import best_expressed
from stepsight.experiments.search.settings import INTERVAL
from stepsight.training.corrections.intervals import seconds_text


def search_report(job: Job, result: SearchResult, top: int) -> dict[str, Any]:
    """The best strategies, and how far the best one is from the optimum."""
    told = result.to_dict()
    pairs = zip(told.pop("choices"), result.choices[:top], strict=False)
    rows = [row | {"needed_bytes": choice.needed_bytes} for row, choice in pairs]
    several = bool(result.plans or result.skipped)
    lines = [f"{job.name}: {result.counts}"]
    lines += _plans(result, top) if several else [_table(rows)]
    own = told["own"]
    if result.own is not None:
        fits = ("tight" if own["tight"] else "fits") if own["fits"] else "does not fit"
        time = seconds_text(own["iteration_time_s"])
        lines.append(f"the job itself: {time}, {result.own.needed_bytes / 1e9:.2f} GB, {fits}")
    if result.baselines:
        times = {name: "no legal plan" if s is None else seconds_text(s) for name, s in result.baselines.items()}
        lines.append(f"baselines: {', '.join(f'{name} {text}' for name, text in times.items())}")
    lines.append(_verdict(result))
    lines += _experts(told.get("expert_placement"), result)
    lines += _rivals(result)
    asked = result.own or (result.best if result.any_fits else None)
    warnings = [] if asked is None or asked.prediction is None else list(asked.prediction.warnings)
    if any(row["tight"] for row in [*rows, *told["plans"][:top], own or told["best"] or {"tight": False}]):
        warnings.append(TIGHT)
    lines += [f"warning: {warning}" for warning in warnings]
    told |= {"too_large": result.too_large, "top": rows, "warnings": warnings, "proof": _verdict(result)}
    return {**told, "text": "\n".join(lines)}


def write_best(
    result: SearchResult, out: Path, to: str, read: tuple[list[Path], Job], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the best strategy, or the best one that a format expresses (``to``; empty: a job file); what to tell about
    it, with a ``text``.  ``read``: the files of the search, and their job; ``asked``: its predictor and space.
    """
    if not to:
        write_text(out, job_toml(result.best.job))
        return {"out": str(out), "text": f"\nwrote the best strategy to {out}"}
    choice, all_legal = best_expressed(result, to, asked["predictor"], asked["space"])
    job = (choice or result.best).job
    written, (files, before) = write_config(job, to), read
    for own in files:
        if edited := edit_config(own, before, job, to, [file for file in files if file != own]):
            break
    text, diff = edited.text if edited is not None else "", None
    write_text(out, text or written.text)
    slower = 100 * ((choice or result.best).timed[0] / result.best.timed[0] - 1)
    which = "the legal strategies" if all_legal else "the strategies evaluated"
    if choice is None:
        few = f"of {which} that fit in memory, {to} expresses none"
        notes = [f"warning: {out} is not the best strategy, only what {to} expresses of it: {few}"]
    elif choice is result.best:
        notes = [f"wrote the best strategy to {out}"]
    else:
        lost = ", ".join(line for line in write_config(result.best.job, to).ignored if line not in written.ignored)
        short = f"wrote {job.name} to {out}: {to} does not express the best strategy ({lost})"
        notes = [f"{short}; of {which} that it expresses this is the best ({slower:+.1f} % iteration time)"]
    if edited is not None:
        diff = diff_text(own, out, text) if text else None
        notes += edited.notes
        if not text:
            notes.append(f"warning: {own} could not be changed in place: {out} lacks its other settings")
        elif not diff:
            notes.append(f"{own} has these settings already")
    told = {"out": str(out), "strategy": job.name, "notes": notes, "diff": diff}
    lines = [*notes, written_text(written, to) if diff is None else diff.rstrip()]
    if diff is None:
        told |= {"notes": [*notes, *written.notes], "ignored": list(written.ignored)}
    return {**told, "text": "\n" + "\n".join(lines).rstrip()}


def _verdict(result: SearchResult) -> str:
    if not result.any_fits:
        return result.proof
    if result.gap_percent is None:
        return "how far the best is from the optimum is not known"
    better = "is faster" if result.goal.objective == "iteration_time" else f"is better by {result.goal.objective}"
    if result.goal.robust == INTERVAL:
        better += " at the upper end of its interval"
    beats = f"by this predictor, no{' other' * (result.gap_percent == 0)} legal strategy that fits {better}"
    by_more = f"{beats} by more than {result.gap_percent:.2g} %"
    if result.regrets:
        regret = f"least expected regret of the {len(result.regrets)} fastest ({result.regrets[0]:.2g} %)"
        return f"{regret}; it is also the fastest: {beats}" if result.gap_percent == 0 else f"{regret}; {by_more}"
    return f"{result.proof}: {beats}" + " by more than this" * (result.gap_percent != 0)


def _plans(result: SearchResult, top: int) -> list[str]:
    """The best strategy of each of the ``top`` best scenarios; those on the front of time and cost are marked."""
    front, of = result.front, result.own or result.choices[0]
    tables, unit = of.job.model.tables, of.job.unit
    rows = [
        {"number": number, "strategy": choice.job.name.removeprefix(f"{choice.job.model_name} "), **row}
        for number, (row, choice) in enumerate(zip(result.to_dict()["plans"], result.plans, strict=True), start=1)
    ]
    columns: dict[str, str | Callable[[dict[str, Any]], Any]] = {
        "#": "number",
        "nodes": "nodes",
        "cluster": lambda row: f"{row['hardware']} {row['fabric']}",
        "batch": "global_batch",
        **({} if tables else {"tokens": "seq_len"}),
        "best strategy": "strategy",
        "iteration": lambda row: seconds_text(row["iteration_time_s"]),
        f"{unit}/s/device": lambda row: f"{row['tokens_per_s_per_device']:,.0f}",
        "training": lambda row: days_text(row["training_time_s"]),
    }
    if any(row["cost"] is not None for row in rows):
        columns["cost"] = lambda row: "-" if row["cost"] is None else f"{row['cost']:,.2f}"
    if any(row["energy_kwh"] is not None for row in rows):
        energy = "energy_kwh"
        columns["MWh, estimate"] = lambda row: "-" if row[energy] is None else f"{row[energy] / 1e3:,.1f}"
    if any(row["tight"] for row in rows):
        columns["fits"] = _fits
    columns["front"] = lambda row: "yes" if {key: row[key] for key in front[0]} in front else ""
    lines = [table_of(rows[:top], columns)] if rows else []
    if len(rows) > top:
        lines.append(f"{len(rows) - top} more combinations (--top {len(rows)} prints all)")
    goal = result.goal
    penalty = f" * (1 + batch / {goal.critical_batch:g})" if goal.critical_batch else ""
    lines.append(f"by {goal.objective}; training on {goal.tokens:.4g}{penalty} {unit}")
    return [*lines, *(f"skipped: {text}" for text in result.skipped)]


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
    many = "strategies" if len(result.rivals) > 1 else "strategy"
    head = f"{len(result.rivals)} {many} cannot be told from the best; the kind of op or collective to measure is "
    columns: dict[str, Callable[[Rival], Any]] = {
        "strategy": lambda rival: rival.choice.job.name.removeprefix(f"{rival.choice.job.model_name} "),
        "slower by %": lambda rival: Number(rival.slower_percent),
        "error of this, %": lambda rival: Number(rival.error_percent),
        "measure": lambda rival: rival.measure,
    }
    return [f"{head}beside each:", table_of(result.rivals, columns)]


def _table(rows: list[dict[str, Any]]) -> str:
    """The strategies; columns without information are left out.  Strategies that do not fit were not timed."""
    columns: dict[str, str | Callable[[dict[str, Any]], Any]] = {"#": "#"}
    if any("sharding" in row for row in rows):
        columns |= {"tables": "placement", "busiest": lambda row: f"{row['imbalance']:.3g}"}
    else:
        columns |= {axis: axis for axis in ("tp", "cp", "ep") if axis == "tp" or any(row[axis] > 1 for row in rows)}
        columns |= {"pp": "pp", "dp": "dp", "mb": "micro_batch"}
        columns["schedule"] = _schedule
        columns["zero"] = lambda row: f"{row['zero_stage']}/{row['dp_shard']}".removesuffix("/0")
        columns["recompute"] = _recompute
        columns["sp"] = lambda row: "yes" if row["sequence_parallel"] else "no"
    if len({row["order"] for row in rows}) > 1:
        columns["order"] = "order"
    if any(row["stage_layers"] for row in rows):
        columns["layers per stage"] = _layers
    if any("imbalance" in row for row in rows):
        columns["busiest"] = lambda row: f"{row['imbalance']:.3g}"
    times = {"iteration": ("iteration_time_s",), "interval": ("low_s", "high_s")}
    for name, keys in times.items():
        columns[name] = lambda row, keys=keys: (  # type: ignore[misc]
            "-" if row["iteration_time_s"] is None else " to ".join(seconds_text(row[key]) for key in keys)
        )
    if any("expected_regret_percent" in row for row in rows):
        regret = "expected_regret_percent"
        columns["regret %"] = lambda row: "-" if row[regret] is None else f"{row[regret]:.2f}"
    columns["GB"] = lambda row: Number(row["needed_bytes"] / 1e9, 2)
    return table_of([{"#": at, **row} for at, row in enumerate(rows, start=1)], {**columns, "fits": _fits})


def _layers(row: dict[str, Any]) -> str:
    """Layers of each part of the model, as ``11 14*12 13``; even ones as ``even``."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(row["stage_layers"])]
    return " ".join(f"{times}*{count}" if times > 1 else str(count) for count, times in runs) or "even"


def _schedule(row: dict[str, Any]) -> str:
    chunks = row["virtual_stages"]
    return "-" if row["pp"] == 1 else f"{row['schedule']} x{chunks}" if chunks > 1 else str(row["schedule"])


def _recompute(row: dict[str, Any]) -> str:
    every = f"/{row['recompute_every']}" if row["recompute"] == "full" and row["recompute_every"] > 1 else ""
    return "offload" if row["offload_activations"] else f"{row['recompute']}{every}"


def _fits(row: dict[str, Any]) -> str:
    return ("tight" if row["tight"] else "yes") if row["fits"] else "NO"
