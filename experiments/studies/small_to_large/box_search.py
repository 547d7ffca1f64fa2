"""Strategies for an unmeasured model: best, second and worst, predicted and then run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepsight.dataset.runs.box_spec import read_box
from stepsight.experiments.studies.small_to_large.box_cases import (
    RATE,
    SEARCHED,
    SEARCHED_BATCH,
    BoxCase,
    case,
    parallel_specs,
    strategy_name,
)
from stepsight.experiments.studies.small_to_large.box_results import Compared, compare_all
from stepsight.experiments.studies.small_to_large.boxes import measure_cases
from stepsight.training.predictor.prediction import predict
from stepsight.training.predictor.predictor import Predictor

RANKS = 16
MOST_TENSOR_PARALLEL = 4  # collectives of more ranks use too much of a small machine's cores
PLACES = ("best", "second", "worst")


def candidates() -> list[BoxCase]:
    """Every strategy with the same global batch: tensor parallel up to four, 1F1B plain and interleaved."""
    box = read_box(f"{RANKS}x1@{RATE}mbit")
    found = []
    for parallel in parallel_specs(SEARCHED, RANKS):
        for chunks in (1, 2, 3):
            parts = parallel.pp * chunks
            batches = SEARCHED_BATCH // parallel.dp
            if (parallel.pp == 1 and chunks > 1) or SEARCHED.layers % parts or parallel.tp > MOST_TENSOR_PARALLEL:
                continue
            if (parallel.pp > 1 and batches < parallel.pp) or (chunks > 1 and batches % parallel.pp):
                continue  # the runtime needs at least as many micro-batches as stages
            found.append(case("searched", SEARCHED, box, replace(parallel, virtual_stages=chunks), batches))
    return found


def search_boxes(predictor: Predictor, out: Path, *, progress: bool) -> dict[str, Any]:
    """Predict all candidates, run three of them, compare."""
    cases = candidates()
    seconds = [predict(found.job, predictor).iteration_time_s for found in cases]
    order = sorted(range(len(cases)), key=seconds.__getitem__)
    chosen = {cases[at].name: place for at, place in zip((order[0], order[1], order[-1]), PLACES, strict=True)}
    runs = [found for found in cases if found.name in chosen]
    measure_cases(runs, out / "search", progress=progress, events=False)
    rows = {chosen[row.measured.case.name]: row for row in compare_all(runs, out / "search", predictor)}
    return _summary({place: rows[place] for place in PLACES if place in rows}, len(cases))


def _summary(rows: Mapping[str, Compared], num_strategies: int) -> dict[str, Any]:
    """``rows`` by rank, for valid runs."""
    choices = [
        {
            "place": place,
            "strategy": strategy_name(row.measured.case.job.parallel),
            "predicted_s": row.prediction.iteration_time_s,
            "measured_s": row.measured.seconds,
            "error": row.error,
        }
        for place, row in rows.items()
    ]
    fastest = min((row.measured.seconds for row in rows.values()), default=0.0)
    return {
        "model": f"gpt of {SEARCHED.layers} layers",
        "strategies": num_strategies,
        "choices": choices,
        "regret": 100 * (rows["best"].measured.seconds / fastest - 1) if "best" in rows else None,
    }
