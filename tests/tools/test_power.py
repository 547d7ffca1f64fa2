"""The clock that runs tell of."""

import math

import pytest

from stepsight.experiments.evaluation.error_metrics import score, without_source
from stepsight.training.shipped.catalogue import chip_powers, shipped_predictor
from tests.experiments.evaluation.run_tables import job_of, run_row
from tools.shipped_data import dense_job, learn, slowdown_of

DENSE = {"hidden": 8192, "ffn": 32768, "heads": 64, "seq_len": 2048, "tp": 8, "pp": 1, "dp": 2, "framework": "NeMo",
         "precision": "bf16", "hardware": "H100-SXM"}  # fmt: skip


def test_a_slowdown_of_products_is_found_again() -> None:
    """Rows of a made-up truth: the predictor's own time where products take 8 % longer than alone."""
    job = job_of(run_row(**DENSE)).job
    plain, longer = (slowdown_of(job, seconds) for seconds in (1.0, 1.08))
    assert plain is not None
    assert longer is not None and 0.05 < longer - plain < 0.2


def test_who_tells_of_the_clock() -> None:
    assert dense_job(run_row(**DENSE)) is not None
    assert dense_job(run_row(**{**DENSE, "framework": "Megatron-LM 2021"})) is None  # other kernels
    assert dense_job(run_row(**DENSE, quality="C")) is None
    assert dense_job(run_row(**{**DENSE, "framework": "NeMo", "pp": 2, "dp": 1, "vp": ""})) is None  # two jobs


def test_every_source_speaks_for_its_chip_and_type() -> None:
    rows = [run_row(**DENSE, source=name) for name in ("a", "a", "b")]
    found = learn([*rows, run_row(**{**DENSE, "precision": "fp8"}, source="c")])
    assert {name: source.runs for name, source in found["H100"]["bf16"].sources.items()} == {"a": 2, "b": 1}
    assert list(found["H100"]["fp8"].sources) == ["c"]


def test_a_source_is_judged_without_what_it_taught() -> None:
    source = next(iter(chip_powers()["H100"]["bf16"].sources))
    shipped = shipped_predictor("h100-sxm-80gb")
    other = without_source(shipped, source)
    assert other is not None and shipped is not None
    assert without_source(shipped, "nobody") is shipped and other.hardware != shipped.hardware
    times = [score(run_row(**DENSE, source=name), shipped_predictor).predicted_s for name in ("nobody", source)]
    assert math.log(times[1] / times[0]) == pytest.approx(0.0, abs=0.05) and times[0] != times[1]
