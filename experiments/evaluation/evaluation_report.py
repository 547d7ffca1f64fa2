"""The text output of ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepsight.experiments.evaluation.evaluate import Evaluation
from stepsight.experiments.reports.text_table import Number, table
from stepsight.training.prediction.prediction_views import seconds_text

_COLUMNS = ("mape", "median", "p90", "max", "bias", "spearman", "regret", "coverage", "out_of_support")
_NAME = 44  # letters of a source's name that are shown
_LEGEND = """\
mape, median, p90, max: of the absolute error |predicted / measured - 1|; bias: its mean with sign; spearman: rank
correlation, 1 at best; regret: how much slower the run that we would choose is than the fastest of the same model,
devices and batch; coverage: measured times within their intervals; outside: rows that take a fifth of their time
or more in what was never measured"""

_MEANS_OF = ("choosing a run, percent", "groups", "runs")
_CHOICE = {
    "regret": "regret",
    "random_regret": "by chance",
    "constant_mfu_regret": "by constant MFU",
    "top_shared": "top 5 found",
    "top_order": "top 5 order",
}
_CHOICE_LEGEND = """\
a group holds several strategies of one model on the same devices with the same global batch; regret: how much longer
the run takes than the fastest that predictions, chance (on average) or constant MFU choose; top 5 found: how many of
the five fastest runs are among the five predicted to be fastest, in groups of more; top 5 order: how many pairs of the
five fastest runs are predicted in their order"""


def evaluation_text(
    result: Evaluation, num_worst: int, calibrated: Mapping[str, Any] | None = None, *, groups: bool = False
) -> str:
    """Figures per source, per kind and overall; the baselines; calibrated figures; skipped rows; the worst rows.

    ``calibrated`` holds what ``Calibrated.to_dict`` returns, by a description of the rows that were fitted;
    ``groups``: also every group of runs between which one could choose.
    """
    value = result.to_dict()
    used = {name: row for name, row in value["sources"].items() if row["used"]}
    parts = [
        f"{_figures([*used.items(), ('overall', value['overall'])])}\n{_LEGEND}",
        _references({name: value["references"][name] for name in (*used, "overall")}),
    ]
    if result.groups:
        means = [[_short(name), row["groups"], row["runs"], *_choice(row)] for name, row in value["choices"].items()]
        parts.append(f"{table([*_MEANS_OF, *_CHOICE.values()], means)}\n{_CHOICE_LEGEND}")
    if result.groups and groups:
        cells = [[row["name"], row["runs"], Number(row["best_s"], 3), Number(row["chosen_s"], 3), row["place"],
                  *_choice(row)] for row in value["groups"]]  # fmt: skip
        parts.append(table(["group", "runs", "fastest s", "chosen s", "place", *_CHOICE.values()], cells))
    parts += [_calibrated(words, figures) for words, figures in (calibrated or {}).items()]
    if kinds := _several(value["kinds"]):
        parts.append(_figures(kinds))
    if result.suspect:
        row = value["suspect"]
        figures = f"{row['used']} rows, MAPE {row['mape']:.1f} %, max {row['max']:.1f} %"
        parts.append(f"rows marked SUSPECT, apart: {figures}")
    others = value["interval_rows"]
    parts.append(
        f"intervals of shipped predictors are as wide as errors on {sum(others.values())} published runs of "
        f"{len(others)} sources say; those of a row's own source never count for it"
    )
    parts += [f"warning: {text}" for text in result.warnings]
    parts += [f"left out {count}: {why}" for why, count in result.skipped.items()]
    parts += [_worst(row) for row in value["worst"][:num_worst]]
    return "\n\n".join(parts)


def _several(kinds: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Rows of the kinds of sources that have more than one."""
    sources = [name.rsplit(": ", 1)[0] for name in kinds]
    return [item for item, source in zip(kinds.items(), sources, strict=True) if sources.count(source) > 1]


def _cell(name: str, value: float | None) -> object:
    return "-" if value is None else Number(value, 3 if name == "spearman" else 1)


def _choice(row: Mapping[str, Any]) -> list[object]:
    return [_cell(key, row[key]) for key in _CHOICE]


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 3] + "..."


def _figures(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    header = ["percent", "rows", "used", *(c.replace("out_of_support", "outside") for c in _COLUMNS)]
    cells = [
        [_kind_name(name), row.get("rows", "-"), row["used"], *(_cell(c, row[c]) for c in _COLUMNS)]
        for name, row in rows
    ]
    return table(header, cells)


def _kind_name(name: str) -> str:
    source, _, kind = name.rpartition(": ")
    return f"{_short(source)}: {kind}" if source else _short(name)


def _references(rows: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["MAPE (max), percent", "constant MFU x bubble, fitted here", "carried forward", "ours there", "on"]
    keys = ("constant_mfu", "carried_forward", "ours_where_carried")
    cells = [
        [_short(name), *(_pair(row[key]) for key in keys), row["carried_forward"]["used"]] for name, row in rows.items()
    ]
    return table(header, cells)


def _calibrated(words: str, value: Mapping[str, Any]) -> str:
    """Table of shipped and calibrated errors on the same larger rows."""
    figures = ("bias", "spearman", "regret", "coverage")
    header = ["larger rows, MAPE (max), percent", "fitted", "judged", "as shipped", "calibrated", "carried forward"]
    cells = [
        [
            _kind_name(name),
            row.get("fitted", "-"),
            row["used"],
            _pair(row["as_shipped"]),
            _pair(row),
            _pair(row["carried_forward"]) if row["carried_forward"] else "-",
            *(_cell(key, row[key]) for key in figures),
        ]
        for name, row in [*value["sources"].items(), *_several(value["kinds"]), ("overall", value["overall"])]
    ]
    return f"calibrated on {words}, judged by larger rows alone\n{table([*header, *figures], cells)}"


def _pair(row: Mapping[str, Any]) -> str:
    return f"{row['mape']:.1f} ({row['max']:.1f})" if row["used"] else "-"


def _worst(row: Mapping[str, Any]) -> str:
    causes = sorted(row["breakdown"].items(), key=lambda item: -item[1])
    shares = [(name, 100 * seconds / row["predicted_s"]) for name, seconds in causes]
    made_of = ", ".join(f"{name} {percent:.0f} %" for name, percent in shares if percent > 1)
    ran = f"{row['job']}, profile {row['framework']}"
    return (
        f"{row['error']:+.1f} %  row {row['row_id']} of {_short(row['source'])}: {ran}\n"
        f"    measured {seconds_text(row['measured_s'])}, predicted {seconds_text(row['predicted_s'])} "
        f"({seconds_text(row['low_s'])} to {seconds_text(row['high_s'])}): {made_of}"
    )
