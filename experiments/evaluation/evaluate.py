"""Published runs against predictions: used rows, reasons for skipping others, figures per source, worst rows."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import JobError, PredictorError, TableError, shorten
from stepsight.dataset.hardware.hardware import read_fabric_words
from stepsight.dataset.job.frameworks import GENERIC, unknown_frameworks
from stepsight.experiments.evaluation import error_metrics
from stepsight.experiments.evaluation.error_metrics import FITTED, Scored, errors, score
from stepsight.experiments.evaluation.runs_table import Row, read_runs_table
from stepsight.experiments.reports.text_table import Column, NotebookBar, Number, table_of
from stepsight.training.corrections.corrector import rows_by
from stepsight.training.corrections.intervals import published_widths, seconds_text
from stepsight.training.predictor.predictor import Predictor

if TYPE_CHECKING:
    from pandas import DataFrame


SUSPECT = "marked SUSPECT (scored apart)"
WEAK = "grade C: more than one field is a guess"


@dataclass(frozen=True)
class Evaluation:
    """Predictions of measured runs: ``to_frame`` has a row for each, ``to_dict`` errors by source, kind and overall.

    Attributes:
        rows: Number of rows by source.
        scored: Rows that count in the figures, in the table's order.
        suspect: Rows that were predicted but are marked as doubtful: they count in no figure.
        rejected: Rows left out, each with the reason.
    """

    rows: Mapping[str, int]
    scored: Sequence[Scored]
    suspect: Sequence[Scored] = ()
    rejected: Sequence[tuple[Row, str]] = ()

    @cached_property
    def left_out(self) -> dict[str, list[Row]]:
        """Rows left out by reason, the most frequent first; rows share the reason that differs only in its values."""
        found = dict[str, list[tuple[str, Row]]]()
        for row, why in [*self.rejected, *((scored.row, SUSPECT) for scored in self.suspect)]:
            first = why.split("; ")[0]
            found.setdefault(first.split(", got ")[0], []).append((first, row))
        groups = (zip(*rows, strict=True) for rows in sorted(found.values(), key=len, reverse=True))
        return {told[0] + " and others" * (len({*told}) > 1): [*rows] for told, rows in groups}

    @property
    def skipped(self) -> dict[str, int]:
        """Number of rows left out, by reason."""
        return {why: len(rows) for why, rows in self.left_out.items()}

    def by(self, key: Callable[[Scored], str]) -> dict[str, list[Scored]]:
        """Rows that count, in groups."""
        return {str(name): [self.scored[i] for i in found] for name, found in rows_by(map(key, self.scored)).items()}

    @property
    def points(self) -> dict[str, list[tuple[float, float]]]:
        """Measured and predicted seconds by source."""
        by_source = self.by(lambda row: row.row.source)
        return {name: [(r.measured_s, r.predicted_s) for r in rows] for name, rows in by_source.items()}

    def worst(self, most: int = 10) -> list[Scored]:
        """Rows with the largest absolute errors, the largest first."""
        return sorted(self.scored, key=lambda row: -abs(row.error))[:most]

    @cached_property
    def groups(self) -> list[dict[str, Any]]:
        """Groups of scored runs that differ only in strategy, with the regret of choosing by prediction."""
        return error_metrics.choice_groups(self.scored)

    @cached_property
    def warnings(self) -> list[str]:
        """Assumptions that replace unknown values, and runs that are said not to fit in memory although they ran."""
        rows = (*self.scored, *self.suspect)
        generic = (row.row.software for row in rows if row.framework.name == GENERIC.name)
        unknown = unknown_frameworks(dict.fromkeys(generic))
        links = ((row.row.text("inter_interconnect"), row.job.cluster.hardware) for row in rows)
        fabrics = [read_fabric_words(text, hardware)[1] for text, hardware in links]
        doubts = Counter([*(doubt for row in rows for doubt in row.software.doubts), *filter(None, fabrics)])
        large = [f"{row.row.row_id} of {_short(row.row.source)}" for row in rows if not row.fits]
        said = f"{len(large)} of {len(rows)} runs that ran are said not to fit in memory: {_named(large)}"
        counted = [f"{count} row{'s' * (count > 1)}: {doubt}" for doubt, count in doubts.items()]
        unread = dict.fromkeys(name for row in rows for name in row.row.unread)
        ignored = f"columns that are not read: {shorten(', '.join(unread), 400)}" if unread else ""
        return [*filter(None, (unknown, said if large else "", ignored)), *counted]

    def __repr__(self) -> str:
        mape = errors([row.predicted_s for row in self.scored], [row.measured_s for row in self.scored]).mape
        error = "" if mape is None else f", MAPE {mape:.1f} %"
        return f"Evaluation({len(self.scored)} of {sum(self.rows.values())} runs, {len(self.rows)} sources{error})"

    def to_frame(self) -> DataFrame:
        """Make a pandas table with a row for each scored run; times in seconds, ``error_percent`` is signed."""
        from pandas import DataFrame

        return DataFrame([row.to_flat_dict() for row in self.scored])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in seconds, other figures in percent, except ``spearman`` and counts."""
        by_source = self.by(lambda row: row.row.source)
        choices = {name: error_metrics.mean_figures([g for g in self.groups if g["source"] == name])
                   for name in dict.fromkeys(group["source"] for group in self.groups)}  # fmt: skip
        worst = [
            {**row.to_dict(), "source": row.row.source, "job": row.job.name, "framework": row.framework.name,
             "error": row.error, "breakdown": row.breakdown}
            for row in self.worst()
        ]  # fmt: skip
        overall, references = figures(self.scored), {}
        for name, rows in [*by_source.items(), ("overall", self.scored)]:
            # Errors of the baselines, and of the predictions on the rows that the second baseline can predict.
            measured, forward = [row.measured_s for row in rows], error_metrics.carried_forward(rows)
            pairs = [(row, seconds) for row, seconds in zip(rows, forward, strict=True) if seconds is not None]
            truth = [row.measured_s for row, _ in pairs]
            references[name] = {
                "constant_mfu": errors(error_metrics.constant_mfu(rows), measured).to_dict(),
                "carried_forward": errors([seconds for _, seconds in pairs], truth).to_dict(),
                "ours_where_carried": errors([row.predicted_s for row, _ in pairs], truth).to_dict(),
            }
        return {
            "sources": {name: {"rows": n, **figures(by_source.get(name, ()))} for name, n in self.rows.items()},
            "overall": {"rows": sum(self.rows.values()), **overall},
            "skipped": self.skipped,
            "rejected": [{"row_id": row.row_id, "source": row.source, "why": why} for row, why in self.rejected],
            **{name: overall[name] for name in ("interval_score", "said_not_to_fit")},
            "warnings": self.warnings,
            "predictions": [row.to_dict() for row in self.scored],
            "kinds": {k: figures(rows) for k, rows in self.by(lambda row: f"{row.row.source}: {row.kind}").items()},
            "references": references,
            "choices": {**choices, "overall": error_metrics.mean_figures(self.groups)},
            "groups": self.groups,
            "suspect": {**figures(self.suspect), "predictions": [row.to_dict() for row in self.suspect]},
            "worst": worst,
            "with_published_runs": {
                "overall": figures([row.with_known for row in self.scored]),
                "sources": {name: figures([row.with_known for row in own]) for name, own in by_source.items()},
            },
            "interval_rows": {name: len(rows) for name, rows in published_widths().sources.items()},
        }


def figures(rows: Sequence[Scored]) -> dict[str, float | None]:
    """The figures of some rows."""
    predicted, measured = [row.predicted_s for row in rows], [row.measured_s for row in rows]
    return {
        **errors(predicted, measured).to_dict(),
        "regret": error_metrics.regret([row.choice for row in rows], predicted, measured),
        "coverage": error_metrics.share([row.in_interval for row in rows]),
        "interval_score": error_metrics.interval_score(rows),
        "said_not_to_fit": sum(not row.fits for row in rows),
        "out_of_support": error_metrics.share([row.out_of_support for row in rows]),
    }


def evaluate(
    runs: str | Path,
    predictor: Predictor | str | None = None,
    *,
    source: str = "*",
    on_row: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Compare predictions with the measured iteration times of a table of runs.

    A row is scored if a job can describe it and the predictor was not fitted on it; other rows are counted by reason.

    Args:
        runs: Table of measured runs (.csv or .csv.gz), one row for each run; ``stepsight evaluate --explain-columns``
            lists its columns.
        predictor: A ``Predictor``, the name of one that comes with the package, or ``"roofline"``; None: each row is
            predicted by the package's predictor for its hardware, or from hardware facts if there is none.
        source: Use only rows whose source matches this pattern or, if none matches, contains it; case is ignored.
        on_row: Called after each row with the numbers of rows done and of all rows; None: in a notebook, a bar shows
            them.

    Returns:
        The predictions beside the measured times: ``.to_frame()``, ``.to_dict()``, ``.worst()``.

    Raises:
        TableError: If the table cannot be read, no row's source matches, or no row can be used.
        PredictorError: If no row can be used because predictors were fitted on them.

    Example:
        >>> result = evaluate("examples/runs.csv")  # doctest: +SKIP
        >>> result.to_frame().groupby("source").error_percent.mean()  # doctest: +SKIP
    """
    path = Path(runs)
    every = read_runs_table(path)
    rows = [row for row in every if fnmatch.fnmatch(row.source.lower(), source.lower())]
    rows = rows or [row for row in every if source.lower() in row.source.lower()]
    there = f"; sources: {', '.join(dict.fromkeys(repr(row.source) for row in every))}" if source != "*" else ""
    if not every:
        raise TableError(f"a table of runs must have at least one row, got none in {path}")
    if not rows:
        raise TableError(f"--source must match the source of a row in {path}, got {source!r:.80}{there}")
    predictor_of, bar = error_metrics.predictor_by_hardware(predictor), NotebookBar("rows")
    scored, suspect, rejected = list[Scored](), list[Scored](), list[tuple[Row, str]]()
    for number, row in enumerate(rows, 1):
        try:
            if row.weak:
                rejected.append((row, WEAK))
            else:
                (suspect if row.suspect else scored).append(score(row, predictor_of))
        except JobError as error:
            rejected.append((row, str(error)))
        (on_row or bar.show)(number, len(rows))
    result = Evaluation(Counter(row.source for row in rows), scored, suspect, rejected)
    if not scored:
        found = f"{len(rows)} row{'' if len(rows) == 1 else 's'} of {path}"
        why = ", ".join(f"{count} x {reason}" for reason, count in result.skipped.items())
        if FITTED in result.skipped:
            raise PredictorError(f"rows that a predictor was fitted on cannot judge it, of {found} are left out: {why}")
        raise TableError(f"at least one row must be usable; of {found} left out: {why}{there}")
    return result


_COLUMNS = ("mape", "median", "p90", "max", "bias", "spearman", "regret", "coverage", "interval_score",
            "out_of_support", "said_not_to_fit")  # fmt: skip
_TITLES = {"out_of_support": "outside", "interval_score": "score", "said_not_to_fit": "too large"}
MOST_NAMED = 5  # rows in a warning
_NAME = 44  # letters of a source's name that are shown
_LEGEND = """\
mape, median, p90, max: of the absolute error |predicted / measured - 1|; bias: its mean with sign; spearman: rank
correlation, 1 at best; regret: how much slower the run that we would choose is than the fastest of the same model,
devices and batch; coverage: measured times within their intervals; score: mean width of intervals and 20 times what
runs lie outside of them, in parts of the measured time; outside: rows that take a fifth of their time or more in what
was never measured; too large: runs that ran and are said not to fit in memory"""

_BASELINES: Mapping[str, str | Column] = {
    "MAPE (max), percent": "name",
    "constant MFU x bubble, fitted here": lambda row: _pair(row["constant_mfu"]),
    "carried forward": lambda row: _pair(row["carried_forward"]),
    "ours there": lambda row: _pair(row["ours_where_carried"]),
    "on": lambda row: row["carried_forward"]["used"],
}
_CHOICE = {
    "regret": "regret",
    "by chance": "random_regret",
    "by constant MFU": "constant_mfu_regret",
    "top 5 found": "top_shared",
    "top 5 order": "top_order",
}
_CHOICE_LEGEND = """\
a group holds several strategies of one model on the same devices with the same global batch; regret: how much longer
the run takes than the fastest that predictions, chance (on average) or constant MFU choose; top 5 found: how many of
the five fastest runs are among the five predicted to be fastest, in groups of more; top 5 order: how many pairs of the
five fastest runs are predicted in their order"""


def evaluation_text(
    result: Evaluation, num_worst: int, calibrated: Mapping[str, Any] | None = None, *, groups: bool = False
) -> str:
    """Figures per source, per kind and overall; the baselines; figures of ``calibrated`` predictions by a description
    of the rows that were fitted; skipped rows; the worst rows; with ``groups`` every group of runs between which one
    could choose.
    """
    value = result.to_dict()
    used = {name: row for name, row in value["sources"].items() if row["used"]}
    parts = [
        f"{_figures([*used.items(), ('overall', value['overall'])])}\n{_LEGEND}",
        table_of([{"name": _short(name), **value["references"][name]} for name in (*used, "overall")], _BASELINES),
    ]
    near = value["with_published_runs"]["overall"]
    parts.append(
        "published runs near a row count too, those of its source and, of a run that taught, not its group: mean error "
        f"{near['mape']:.1f} %, median {near['median']:.1f} %, coverage {near['coverage']:.0f} %"
        + ("" if near["regret"] is None else f", regret {near['regret']:.1f} %")
    )
    if result.groups:
        means = [{"name": _short(name), **row} for name, row in value["choices"].items()]
        columns = {"choosing a run, percent": "name", "groups": "groups", "runs": "runs", **_CHOICE}
        parts.append(f"{table_of(means, columns)}\n{_CHOICE_LEGEND}")
    if result.groups and groups:
        columns = {"group": "name", "runs": "runs", "fastest s": "best_s", "chosen s": "chosen_s", "place": "place"}
        parts.append(table_of(value["groups"], {**columns, **_CHOICE}))
    parts += [_calibrated(words, figures) for words, figures in (calibrated or {}).items()]
    if kinds := _several(value["kinds"]):
        parts.append(_figures(kinds))
    if (told := value["suspect"])["used"]:
        parts.append("rows marked SUSPECT, apart: {used} rows, MAPE {mape:.1f} %, max {max:.1f} %".format(**told))
    others = value["interval_rows"]
    wide = f"as wide as errors on {sum(others.values())} published runs of {len(others)} sources say"
    parts.append(f"intervals of shipped predictors are {wide}; those of a row's own source never count for it")
    parts += [f"warning: {text}" for text in result.warnings]
    for why, rows in result.left_out.items():
        parts.append(f"left out {len(rows)}: {why} ({_named([str(row.row_id) for row in rows])})")
    parts += [_worst(row) for row in value["worst"][:num_worst]]
    return "\n\n".join(parts)


def _several(kinds: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Rows of the kinds of sources that have more than one."""
    sources = Counter(name.rsplit(": ", 1)[0] for name in kinds)
    return [(name, row) for name, row in kinds.items() if sources[name.rsplit(": ", 1)[0]] > 1]


def _named(rows: Sequence[str]) -> str:
    """Rows by their ids, the first of many."""
    more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(rows[:MOST_NAMED])}{more}"


def _short(name: str) -> str:
    """A source's name, and its kind if it has one."""
    source, colon, kind = name.rpartition(": ") if ": " in name else (name, "", "")
    return (source if len(source) <= _NAME else source[: _NAME - 3] + "...") + colon + kind


def _figures(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    named = [{"name": _short(name), "rows": "-", **row} for name, row in rows]
    columns: dict[str, str | Column] = {"percent": "name", "rows": "rows", "used": "used"}
    columns |= {_TITLES.get(key, key): key for key in _COLUMNS}
    columns["spearman"] = lambda row: row["spearman"] and Number(row["spearman"], 3)
    columns["score"] = lambda row: row["interval_score"] and Number(row["interval_score"], 2)
    return table_of(named, columns)


def _calibrated(words: str, value: Mapping[str, Any]) -> str:
    """Table of shipped and calibrated errors on the same larger rows."""
    columns: dict[str, str | Column] = {
        "larger rows, MAPE (max), percent": lambda row: _short(row["name"]),
        "fitted": lambda row: row.get("fitted", "-"),
        "judged": "used",
        "as shipped": lambda row: _pair(row["as_shipped"]),
        "calibrated": _pair,
        "carried forward": lambda row: _pair(row["carried_forward"]),
        **{key: key for key in ("bias", "spearman", "regret", "coverage")},
    }
    rows = [*value["sources"].items(), *_several(value["kinds"]), ("overall", value["overall"])]
    shown = table_of([{"name": name, **row} for name, row in rows], columns)
    return f"calibrated on {words}, judged by larger rows alone\n{shown}"


def _pair(row: Mapping[str, Any] | None) -> str:
    return f"{row['mape']:.1f} ({row['max']:.1f})" if row and row["used"] else "-"


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
