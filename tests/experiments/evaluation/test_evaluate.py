"""Published runs against predictions: what counts, what does not, references, and nobody judges what was fitted."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepsight.dataset.base.errors import PredictorError, TableError
from stepsight.experiments.calibration.calibrate_runs import split_rows
from stepsight.experiments.evaluation import error_metrics
from stepsight.experiments.evaluation.error_metrics import (
    PredictorOf,
    carried_forward,
    constant_mfu,
    predictor_by_hardware,
    score,
)
from stepsight.experiments.evaluation.evaluate import evaluate, evaluation_text, figures
from stepsight.experiments.evaluation.runs_table import RowError
from stepsight.training.corrections.residual import JobFeatures, PublishedRun, PublishedRuns
from stepsight.training.prediction.prediction import ROOFLINE
from stepsight.training.shipped.catalogue import shipped_predictor
from tests.experiments.evaluation.run_tables import digest_of, run_row, write_runs

ROOT = Path(__file__).parents[3]
RUNS = Path(os.environ.get("STEPSIGHT_DATA", ROOT.parent / "shared" / "data")) / "e2e" / "published_runs.csv.gz"
FACTS: PredictorOf = lambda hardware: None
FIGURES = {
    "used", "mape", "median", "p90", "max", "bias", "spearman", "regret", "coverage", "out_of_support",
    "interval_score", "said_not_to_fit",
}  # fmt: skip


def series(*gpus: int, **changes: Any) -> list[Any]:
    """Runs of one job that grows by replicas."""
    tables = ({"row_id": n, "gpus": n, "nodes": n // 8, "dp": n // 8, "global_batch": 4 * n} for n in gpus)
    return [run_row(**{**table, **changes}) for table in tables]


def test_a_run_that_cannot_fit_is_said(tmp_path: Path) -> None:
    """Counted, named in a warning, and marked; the others are not."""
    large = run_row(row_id=7, layers=96, hidden=12288, heads=96, ffn=49152, tp=1, pp=1, dp=16, recompute="none")
    result = evaluate(write_runs(tmp_path / "runs.csv", run_row(), large), ROOFLINE)
    value = result.to_dict()
    assert value["said_not_to_fit"] == value["overall"]["said_not_to_fit"] == 1
    assert [row["fits"] for row in value["predictions"]] == [True, False]
    assert "1 of 2 runs that ran are said not to fit in memory: row 7 of lab" in value["warnings"]
    assert "warning: 1 of 2 runs that ran" in evaluation_text(result, 0) and value["interval_score"] > 0


def test_what_counts(tmp_path: Path) -> None:
    """Doubted rows stand apart, weak and unknown ones are counted by their reason, the source is chosen by pattern."""
    rows = [
        *series(8, 16, 32),
        run_row(row_id=4, notes="SUSPECT"),
        run_row(row_id=5, quality="C"),
        run_row(row_id=6, hidden=""),
        run_row(row_id=7, hidden="", source="Lab two"),
    ]
    result = evaluate(write_runs(tmp_path / "runs.csv", *rows), ROOFLINE, source="LAB")
    value = result.to_dict()
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert [row["row_id"] for row in value["predictions"]] == [8, 16, 32]
    assert set(value["predictions"][0]) == {"row_id", "profile", "fits", "measured_s", "predicted_s", "low_s", "high_s"}
    assert set(value["sources"]) == {"lab"} and set(value["sources"]["lab"]) == FIGURES | {"rows"}
    assert value["sources"]["lab"]["rows"] == 6 and value["overall"]["used"] == 3
    assert value["suspect"]["used"] == 1 and sum(value["skipped"].values()) == 3
    assert len(value["rejected"]) == 2 and all(row["why"] and row["row_id"] != "" for row in value["rejected"])
    assert value["overall"]["out_of_support"] == 100.0  # nothing was measured
    assert "SUSPECT" in evaluation_text(result, 2) and "left out 1: hidden is unknown" in evaluation_text(result, 2)
    assert set(evaluate(tmp_path / "runs.csv", ROOFLINE, source="AB").rows) == {"lab", "Lab two"}  # what holds it
    with pytest.raises(TableError, match=r"--source must match .*, got 'nobody'; sources: 'lab', 'Lab two'"):
        evaluate(tmp_path / "runs.csv", ROOFLINE, source="nobody")


def test_a_source_without_usable_rows(tmp_path: Path) -> None:
    """Its figures are empty; a table without any is refused, with the reasons and what else there is."""
    path = write_runs(
        tmp_path / "runs.csv", run_row(), run_row(hidden="", source="two"), run_row(quality="C", source="two")
    )
    result = evaluate(path, ROOFLINE).to_dict()
    assert result["sources"]["two"] == {"rows": 2, **dict.fromkeys(FIGURES), "used": 0, "said_not_to_fit": 0}
    reasons = "1 x hidden is unknown, 1 x grade C: more than one field is a guess; sources: 'lab', 'two'"
    with pytest.raises(TableError, match=f"of 2 rows of .*runs.csv left out: {reasons}"):
        evaluate(path, ROOFLINE, source="two")


def test_an_unknown_framework_is_told(tmp_path: Path) -> None:
    """Once for all rows, with the profile that was taken."""
    rows = [run_row(framework=name) for name in ("mine", "mine", "NeMo", "")]
    result = evaluate(write_runs(tmp_path / "runs.csv", *rows), ROOFLINE)
    (warning,) = result.to_dict()["warnings"]
    assert warning.startswith("no profile knows framework 'mine': generic")
    assert f"warning: {warning}" in evaluation_text(result, 0)


def test_progress(tmp_path: Path) -> None:
    """Every row is told of, whether or not it counts."""
    told: list[tuple[int, int]] = []
    path = write_runs(tmp_path / "runs.csv", run_row(), run_row(hidden=""))
    evaluate(path, ROOFLINE, on_row=lambda done, of: told.append((done, of)))
    assert told == [(1, 2), (2, 2)]


def test_references() -> None:
    """The smallest run's speed carried forward; one utilisation and the bubble, exact for rows that are made so."""
    rows = [score(row, FACTS) for row in series(8, 16, 32)]
    assert carried_forward(rows) == [None, pytest.approx(1.0), pytest.approx(1.0)]
    seconds = constant_mfu(rows)
    assert seconds[1] / seconds[0] == pytest.approx(1.0)  # the same micro-batches for each replica
    deeper = [score(row, FACTS) for row in (*series(8), *series(16, pp=4, dp=1))]
    assert carried_forward(deeper) == [None, None]  # two series


def test_carried_from_the_run_that_is_most_alike() -> None:
    """Of several smallest runs the one with the same micro-batch; its speed holds for other batches."""
    small = [
        run_row(gpus=8, nodes=1, dp=1, micro_batch=micro, global_batch=32, iteration_time_s=seconds)
        for micro, seconds in ((1, 3.0), (2, 2.0))
    ]
    large = run_row(gpus=16, global_batch=128)
    assert carried_forward([score(row, FACTS) for row in (*small, large)])[2] == pytest.approx(4.0)


def test_repeated_smallest_runs_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them gives its speed; the work grows with the rows of a table, not with their square."""
    small, large = (score(row, FACTS) for row in series(8, 16))
    slower, compared = replace(small, measured_s=9.0), [0]
    expected = carried_forward([small, large])[1]

    def count(*values: float) -> float:
        compared[0] += 1
        return max(values)

    monkeypatch.setattr(error_metrics, "max", count, raising=False)
    assert carried_forward([small, *[slower] * 20, *[large] * 20]) == [*[None] * 21, *[expected] * 20]
    assert compared[0] == 20


def test_small_rows_calibrate_and_large_ones_judge() -> None:
    """At most 8 devices, or a source's smallest size."""
    rows = [score(row, FACTS) for row in (*series(8, 16), *series(16, 32, source="big"))]
    fitted, judging = split_rows(rows)
    assert [(r.row.source, r.row.gpus) for r in fitted] == [("lab", 8), ("big", 16)]
    assert [(r.row.source, r.row.gpus) for r in judging] == [("lab", 16), ("big", 32)]


def test_fitted_rows_cannot_judge(tmp_path: Path) -> None:
    """They are left out; where nothing else remains that is refused, as is a predictor for other hardware."""
    rows = series(8, 16)
    path = write_runs(tmp_path / "runs.csv", *rows)
    seen: Any = SimpleNamespace(
        hardware=SimpleNamespace(name="a100-sxm-80gb"),
        manifest={"fitted_rows": [digest_of(rows[0])]},
        kernels_asked=lambda job: None,
    )
    with pytest.raises(RowError, match="the predictor was fitted on it; row 8 of lab"):
        score(rows[0], lambda hardware: seen)
    alone = write_runs(tmp_path / "alone.csv", rows[0])
    with pytest.raises(
        PredictorError, match=r"cannot judge it, of 1 row of .* are left out: 1 x the predictor was fit"
    ):
        evaluate(alone, seen)
    other: Any = SimpleNamespace(hardware=SimpleNamespace(name="toy"), manifest={})
    with pytest.raises(TableError, match="2 x the predictor is for other hardware"):
        evaluate(path, other)


def test_who_answers() -> None:
    """A named predictor answers for all rows; else what is shipped, and facts where nothing is."""
    named: Any = SimpleNamespace()
    assert predictor_by_hardware(named)("a100-sxm-80gb") is named
    assert predictor_by_hardware()("mi300x-192gb") is None


def test_a_frame_has_a_row_for_each_run_that_counts(tmp_path: Path) -> None:
    """With the figures of ``to_dict``; a predictor may be given by its name."""
    result = evaluate(str(write_runs(tmp_path / "runs.csv", *series(8, 16))), "a100-sxm")
    frame, told = result.to_frame(), result.to_dict()
    assert list(frame["predicted_s"]) == [row["predicted_s"] for row in told["predictions"]]
    assert frame["error_percent"].abs().mean() == pytest.approx(told["overall"]["mape"])
    assert 100 * frame["in_interval"].mean() == pytest.approx(told["overall"]["coverage"])
    causes = [name for name in frame.columns if name.removesuffix("_s") in result.scored[0].breakdown]
    assert list(frame[causes].sum(axis=1)) == pytest.approx(list(frame["predicted_s"]))
    assert repr(result).startswith("Evaluation(2 of 2 runs, 1 sources, MAPE ")
    with pytest.raises(PredictorError, match=r"a predictor is a folder with manifest.json, or .*, got 'nobody'"):
        evaluate(tmp_path / "runs.csv", "nobody")


def test_figures_of_a_perfect_prediction() -> None:
    """No error, nothing to regret."""
    first = score(run_row(), FACTS)
    rows = [score(run_row(iteration_time_s=first.predicted_s), FACTS)]
    rows.append(score(run_row(tp=8, dp=1, iteration_time_s=2 * first.predicted_s), FACTS))
    found = figures(rows[:1])
    assert found["mape"] == pytest.approx(0.0, abs=1e-9) and found["coverage"] == 100.0
    assert rows[0].choice == rows[1].choice and figures(rows)["regret"] is not None


@pytest.mark.parametrize(("heads", "same"), [(16, True), (8, False)])
def test_a_choice_is_between_strategies_of_one_model(heads: int, same: bool) -> None:
    """Tuning logs have models of one size and name with other heads; none of these is a strategy of another."""
    one, other = score(run_row(), FACTS), score(run_row(heads=heads, tp=8, dp=1), FACTS)
    assert (one.choice == other.choice) == same


def test_a_row_is_judged_without_its_source_and_shown_with_the_other_groups_of_it() -> None:
    """A run that taught the shipped correction is predicted again without its group; physics knows none of them."""
    row = run_row(framework="NeMo", hardware="H100-SXM", precision="bf16", source="lab")
    scored = score(row, shipped_predictor)
    job, predictor = scored.job, shipped_predictor(scored.job.cluster.hardware)
    like = JobFeatures.of(job, "nemo")
    assert predictor is not None and like.labels[0] == job.framework == "nemo"
    runs = [PublishedRun(scored.digest, "lab", "GPT-x", 0.2, like), PublishedRun("other", "lab", "GPT-y", 0.1, like)]
    taught = predictor.with_published(PublishedRuns(tuple(runs), 2.0))
    physics, found = score(row, lambda _: predictor.with_published(None)), score(row, lambda _: taught)
    alone = score(row, lambda _: predictor.with_published(PublishedRuns((runs[1],), 2.0)))
    assert found.known is not None and alone.known is not None and physics.known is None
    assert found.predicted_s == pytest.approx(physics.predicted_s)
    assert found.known[0] == pytest.approx(alone.known[0]) and found.known[0] > 1.05 * physics.predicted_s
    assert found.with_known.predicted_s == found.known[0]
    far = replace(like, place=tuple(value + 9.0 for value in like.place))
    near = PublishedRuns((replace(runs[0], digest="far", log=0.0, like=far), replace(runs[1], source="others")), 2.0)
    other = score(row, lambda _: predictor.with_published(near))  # the nearest run is none of the row's source
    assert other.known is not None and physics.predicted_s < other.known[0] < 1.03 * physics.predicted_s


@pytest.mark.skipif(not RUNS.exists(), reason=f"no table of published runs at {RUNS} (set STEPSIGHT_DATA)")
def test_published_runs() -> None:
    """Nine of ten well graded dense rows of the sets that judge are answered, from facts alone within reason."""
    sets = ("vTrain*", "*llm-foundry*", "*dgxc*", "*torchtitan*", "InternEvo*", "*SC21 Table 1*", "*BLOOM*", "Korth*")
    for name in sets:
        result = evaluate(RUNS, ROOFLINE, source=name).to_dict()
        complete = sum(row["rows"] for row in result["sources"].values())
        complete -= sum(n for why, n in result["skipped"].items() if "grade" in why or "SUSPECT" in why)
        assert result["overall"]["used"] >= 0.85 * complete, (name, result["skipped"])
        assert result["overall"]["mape"] <= 40, name
        assert set(result["references"]["overall"]) == {"constant_mfu", "carried_forward", "ours_where_carried"}


def test_words_for_links_that_are_not_understood_are_said(tmp_path: Path) -> None:
    path = write_runs(tmp_path / "runs.csv", run_row(inter_interconnect="carrier pigeons"), run_row(row_id="2"))
    (warning,) = [each for each in evaluate(path).warnings if "pigeons" in each]
    assert warning.startswith("1 row: words for the fabric of a100-sxm-80gb are not understood (carrier, pigeons)")
    assert "name a preset, such as dgx-a100" in warning


def test_each_row_and_column_is_used_or_told(tmp_path: Path) -> None:
    """A row with more or fewer cells than columns counts as its source's, and does not stop the others; a misspelt
    column is named.
    """
    path = write_runs(tmp_path / "runs.csv", run_row(), run_row(row_id="2", notes="one, two"), run_row(row_id="3"))
    ends = ("recmpute", "x", "y", "z")
    path.write_text("".join(f"{a},{b}\n" for a, b in zip(path.read_text().splitlines(), ends, strict=True)))
    result = evaluate(path)
    assert "columns that are not read: recmpute" in result.warnings
    assert len(result.scored) == 2 and result.skipped == {"it has more or fewer cells than columns": 1}
    path.write_text(path.read_text() + path.read_text().splitlines()[1].rpartition(",")[0])
    result = evaluate(path)
    assert result.skipped == {"it has more or fewer cells than columns": 2} and len(result.rows) == 1
