"""Calibrating on small rows: only they are seen, only larger ones judge, and what does not help is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import PredictorError, StepsightError, TableError
from stepsight.experiments.calibration.calibrate_runs import (
    COPY,
    FITTED_ON,
    LARGER,
    SIZES,
    SPLITS,
    calibrate,
    calibrate_small,
    read_most_gpus,
    source_of,
    split_rows,
    sure_gain,
)
from stepsight.experiments.evaluation.error_metrics import FITTED, OTHER_HARDWARE, predictor_by_hardware, score
from stepsight.experiments.evaluation.evaluate import WEAK, Evaluation, evaluate, evaluation_text
from stepsight.experiments.evaluation.runs_table import Row, RowError
from stepsight.experiments.questions.describe import describe
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor
from tests.experiments.evaluation.run_tables import digest_of, run_row, write_runs

SIZES_SEEN = (8, 16, 64, 256)


def lab(off: dict[int, float], **cells: Any) -> list[Row]:
    """One series, each run by a factor off what the shipped predictor says."""
    rows = []
    for gpus, factor in off.items():
        sizes = {"gpus": gpus, "nodes": gpus // 8, "dp": gpus // 8, "global_batch": 4 * gpus, "row_id": gpus}
        plain = {**sizes, "tp": 8, "pp": 1, **cells}
        guess = score(run_row(**plain), shipped_predictor).predicted_s
        rows.append(run_row(**plain, iteration_time_s=guess * factor))
    return rows


def table(path: Path, *rows: Row) -> Evaluation:
    return evaluate(write_runs(path / "runs.csv", *rows))


def test_small_rows_alone_are_fitted(tmp_path: Path) -> None:
    """What is off by as much at all sizes is right after calibration, beside figures as shipped of the same rows."""
    result = table(tmp_path, *lab(dict.fromkeys(SIZES_SEEN, 1.15)))
    value = calibrate_small(result, shipped_predictor, 8, source_of)
    found = value["sources"]["lab"]
    assert (found["fitted"], found["used"], found["as_shipped"]["used"]) == (1, 3, 3)
    assert found["as_shipped"]["mape"] == pytest.approx(13.0, abs=0.1) and found["mape"] < 2.5
    assert [row["row_id"] for row in value["predictions"]] == [16, 64, 256]
    assert value["overall"]["coverage"] == 100.0
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    text = evaluation_text(result, 0, {FITTED_ON["calibrated_by_source"].format(8): value})
    assert "calibrated on rows of at most 8 devices alone" in text and "carried forward" in text


def test_larger_rows_change_nothing_of_a_fit(tmp_path: Path) -> None:
    """Other times of the rows that judge leave the calibrated predictions as they are, to the last bit."""
    found = []
    for number, factor in enumerate((1.0, 1.4)):
        (tmp_path / str(number)).mkdir()
        result = table(tmp_path / str(number), *lab({8: 1.15, 16: factor, 64: 1 / factor}))
        value = calibrate_small(result, shipped_predictor, 8, source_of)
        found.append([row["predicted_s"] for row in value["predictions"]])
    assert found[0] == found[1]


def test_series_begin_at_their_own_smallest_size() -> None:
    """A model that needs 64 devices is fitted there; by source alone it is judged there."""
    rows = [score(row, shipped_predictor) for row in lab({8: 1.0, 16: 1.0})]
    rows += [score(row, shipped_predictor) for row in lab({64: 1.0, 256: 1.0}, hidden=2048, ffn=8192)]
    assert [row.row.gpus for row in split_rows(rows, set_of=SPLITS["calibrated"])[0]] == [8, 64]
    assert [row.row.gpus for row in split_rows(rows)[0]] == [8]
    assert set(SPLITS) == set(FITTED_ON)


def answer_of(*args: Any, **options: Any) -> dict[str, Any]:
    """What the command prints, as values and as text."""
    report = calibrate(*args, **options)
    assert report.released == report.to_dict()["released"] and len(repr(report)) < 120 + len(str(report.out))
    return {**report.to_dict(), "text": report.text}


def test_a_better_predictor_is_written_with_its_evidence(tmp_path: Path) -> None:
    """It names every fitted row, leaves those out of the score, and says on what it was calibrated."""
    rows = lab(dict.fromkeys(SIZES_SEEN, 1.15))
    runs = write_runs(tmp_path / "runs.csv", *rows)
    answer = answer_of(runs, Predictor.load("a100-sxm"), tmp_path / "mine")
    assert answer["released"] and answer["evidence"]["by"] == LARGER
    assert answer["evidence"]["after"]["mape"] < answer["evidence"]["before"]["mape"]
    mine = Predictor.load(tmp_path / "mine")
    assert mine.manifest["fitted_rows"] == [digest_of(rows[0])]
    assert set(mine.manifest["calibration"]["judged_rows"]) == set(map(digest_of, rows[1:]))
    assert mine.manifest["calibration"]["constants"]["products"]["prior_std_log"] > 0
    assert mine.source.startswith("predictor for a100-sxm-80gb") and mine.manifest["digest"] in mine.source
    result = evaluate(runs, mine).to_dict()
    assert result["skipped"] == {FITTED: 1} and result["overall"]["used"] == 3
    assert result["overall"]["mape"] == pytest.approx(answer["evidence"]["after"]["mape"], abs=1e-6)
    with pytest.raises(PredictorError, match="fitted on none of its rows"):
        calibrate(runs, mine, tmp_path / "twice")
    assert mine.source.endswith("no context model, calibrated on 1 run of runs.csv)")
    shown = describe(tmp_path / "mine")["text"]
    assert "calibrated   on 1 run of runs.csv, by 'Megatron-LM'" in shown and "larger runs (3): mean error 14." in shown


def test_no_interval_is_narrower_than_what_judging_runs_were_off_by(tmp_path: Path) -> None:
    """But theirs, which would else be judged by themselves; fewer than ten tell nothing."""
    off = {8: 1.3} | {gpus: 1.3 if gpus < 80 else 1.75 for gpus in range(16, 96, 8)}
    rows, (new,) = lab(off), lab({128: 1.3})
    for judges, least in ((9, 0.0), (10, math.log(1.75 / 1.3))):
        runs = write_runs(tmp_path / "runs.csv", *rows[: 1 + judges])
        answer = answer_of(runs, Predictor.load("a100-sxm"), tmp_path / "mine")
        assert answer["released"] and answer["least_half_width_log"] == pytest.approx(least, abs=0.03)
        assert ("intervals reach" in answer["text"]) == (least > 0)
        mine = Predictor.load(tmp_path / "mine")
        scored = [score(row, lambda hardware, own=mine: own) for row in (*rows[1:11], new)]
        *judged, unseen = [math.log(row.high_s / row.low_s) / 2 for row in scored]
        assert max(judged) < 0.18 and unseen == pytest.approx(max(max(judged), least), abs=0.03)


def test_rows_left_out_are_counted_by_their_reason(tmp_path: Path) -> None:
    """Also the larger ones that another source's smallest runs tell of."""
    rows = lab(dict.fromkeys(SIZES_SEEN, 1.15))
    others = [run_row(row_id=2, quality="C"), run_row(row_id=3, hidden=""), run_row(row_id=4, hardware="H100-SXM")]
    told_twice = [Row({**row.cells, "source": "other"}) for row in rows[1:2]]
    runs = write_runs(tmp_path / "runs.csv", *rows, *others, *told_twice)
    answer = answer_of(runs, Predictor.load("a100-sxm"), tmp_path / "mine")
    assert (answer["fitted"], answer["evidence"]["before"]["used"]) == (2, 2)
    assert answer["skipped"] == {WEAK: 1, "hidden is unknown": 1, OTHER_HARDWARE: 1, COPY: 1}
    assert "left out 1: hidden is unknown\nleft out 1: the predictor is for other hardware" in answer["text"]


def test_a_job_that_names_its_framework_is_predicted_as_its_row(tmp_path: Path) -> None:
    """By a calibrated predictor too; another framework is told."""
    rows = lab(dict.fromkeys(SIZES_SEEN, 1.15))
    calibrate(write_runs(tmp_path / "runs.csv", *rows), Predictor.load("a100-sxm"), tmp_path / "mine")
    mine = Predictor.load(tmp_path / "mine")
    scored = score(rows[2], lambda hardware: mine)
    named = predict(replace(scored.job, framework="Megatron-LM"), mine)
    assert named.iteration_time_s == scored.predicted_s and not named.warnings
    (warning,) = predict(replace(scored.job, framework="InternEvo"), mine).warnings
    assert warning.startswith("framework 'InternEvo' ran none of the runs") and "theirs: 'Megatron-LM'" in warning


def test_fitted_rows_are_known_again_in_other_words(tmp_path: Path) -> None:
    """Spelling, column order, notes, number and who tells of them change nothing; another time is another run."""
    rows = lab(dict.fromkeys(SIZES_SEEN, 1.15))
    calibrate(write_runs(tmp_path / "runs.csv", *rows), Predictor.load("a100-sxm"), tmp_path / "mine")
    mine = predictor_by_hardware(Predictor.load(tmp_path / "mine"))
    words = {"gpus": "8", "layers": " 8 ", "hidden": "1.024e3", "dp": "", "row_id": "x", "source": "me", "notes": "z"}
    cells = {**rows[0].cells, **words, "precision": "FP16 mixed", "framework": "megatron-lm (fork)"}
    respelled = Row(dict(reversed(cells.items())))
    with pytest.raises(RowError, match=FITTED):
        score(respelled, mine)
    for rounded in ("{:.3f}", "{:.4g}"):
        time = rounded.format(float(rows[0].cells["iteration_time_s"]))
        with pytest.raises(RowError, match=FITTED):
            score(Row({**cells, "iteration_time_s": time}), mine)
    assert score(Row({**cells, "iteration_time_s": "3.21"}), mine).predicted_s > 0


def test_what_does_not_help_is_refused(tmp_path: Path) -> None:
    """The evidence is told and nothing is written; no more where another unit was meant, and most of it stays wrong."""
    for factors in ({8: 1.2, 16: 1.0, 64: 1.0}, dict.fromkeys(SIZES_SEEN, 1000.0)):
        runs = write_runs(tmp_path / "runs.csv", *lab(factors))
        answer = answer_of(str(runs), "a100-sxm", str(tmp_path / "mine"))
        assert not answer["released"] and "REFUSED" in answer["text"] and "out" not in answer
    assert not (tmp_path / "mine").exists()


def test_what_would_choose_slower_runs_is_refused(tmp_path: Path) -> None:
    """A lower mean error is not enough."""
    runs = write_runs(tmp_path / "runs.csv", *lab(dict.fromkeys(SIZES_SEEN, 1.15)))
    report = calibrate(runs, "a100-sxm", tmp_path / "mine")
    assert report.released and not report.evidence.problems
    (problem,) = replace(report.evidence, regrets=(1.0, 2.0)).problems  # conditions that are met are not listed
    assert problem == "runs chosen by it would be 2.0 % slower than the fastest, 1.0 % without"
    refused = replace(report, problems=[problem])
    assert not refused.released and refused.text.endswith(f"REFUSED, nothing was written: {problem}")


def test_carrying_forward_is_told_beside(tmp_path: Path) -> None:
    answer = answer_of(
        write_runs(tmp_path / "runs.csv", *lab(dict.fromkeys(SIZES_SEEN, 1.15))), "a100-sxm", tmp_path / "mine"
    )
    told = answer["evidence"]
    assert told["carried_forward"]["used"] == told["ours_where_carried"]["used"] == 3
    assert told["ours_where_carried"]["mape"] < told["carried_forward"]["mape"]
    assert "carrying forward the smallest run of each series: mean error" in answer["text"]


def test_without_larger_rows_they_are_left_out_in_turn(tmp_path: Path) -> None:
    """By size where there are several."""
    runs = write_runs(tmp_path / "runs.csv", *lab({8: 1.1, 16: 1.1, 64: 1.1}))
    answer = answer_of(runs, Predictor.load("a100-sxm"), tmp_path / "mine", max_devices=64)
    assert answer["released"] and answer["fitted"] == 3 and answer["evidence"]["by"] == SIZES
    one = write_runs(tmp_path / "one.csv", *lab({8: 1.1}))
    with pytest.raises(TableError, match=r"at least 2 runs on a100-sxm-80gb .* got 1 of 1 rows"):
        calibrate(one, Predictor.load("a100-sxm"), tmp_path / "none")


def test_a_row_that_is_there_twice_does_not_judge_itself(tmp_path: Path) -> None:
    """Noise would be released by its own copies, in the same source or in another."""
    predictor = shipped_predictor("a100-sxm-80gb")
    assert predictor is not None
    noise = [lab({8: factor}, micro_batch=n + 1, global_batch=32 * (n + 1))[0] for n, factor in enumerate((0.8, 1.3))]
    twice = [row for row in noise for _ in range(2)]
    report = answer_of(write_runs(tmp_path / "twice.csv", *twice), predictor, tmp_path / "out")
    once = answer_of(write_runs(tmp_path / "once.csv", *noise), predictor, tmp_path / "out2")
    assert report["evidence"]["after"]["mape"] == pytest.approx(once["evidence"]["after"]["mape"], rel=0.2)


@pytest.mark.parametrize("text", ["8", "8gpus", "<=8gpus", "≤8gpus", "8 GPUs", "8 devices"])
def test_numbers_of_devices(text: str) -> None:
    assert read_most_gpus(text) == 8


@pytest.mark.parametrize("text", ["few", "0", "9" * 5000 + "gpus"])
def test_no_number_of_devices(text: str) -> None:
    rule = r"--calibrate takes a number of devices below 10\^9, as in 8gpus, got '"
    with pytest.raises(StepsightError, match=rule + text[:30]):
        read_most_gpus(text)


def test_shipped_predictors_were_fitted_on_no_run() -> None:
    """Their manifests say so, and nothing corrects whole iterations."""
    for name in ("a100-sxm", "h100-sxm"):
        predictor = Predictor.load(name)
        assert predictor.manifest["fitted_rows"] == []
        assert predictor.calibration.factor(score(run_row(), lambda hardware: None).job) == 1.0
        assert not any("published" in source or "e2e" in source for source in predictor.manifest["sources"])


def test_few_runs_that_differ_show_nothing() -> None:
    """Of three judging runs a gain of two points may be chance; of thirty alike it is not."""
    row = score(run_row(), lambda hardware: None)
    off = row.predicted_s / row.measured_s - 1.0
    closer = [row.measured_s * (1.0 + off * (1.0 - 0.02 / abs(off)))]
    assert sure_gain([row] * 3, closer * 3) < 0 < sure_gain([row] * 30, closer * 30) < 2.0
