from pathlib import Path

import pytest

from stepsight.dataset.errors import PredictorError
from stepsight.dataset.op import Op
from stepsight.training.predictor import Predictor
from stepsight.training.tracking import default_uri, load_registered, tracked


def test_a_predictor_comes_back_from_the_registry(predictor: Predictor, tmp_path: Path) -> None:
    uri = default_uri(tmp_path / "p")
    predictor.save(tmp_path / "p")
    with tracked(uri, "toy") as run:
        run.log({"seed": 0}, {"mape": 3.5}, {"stepsight.hardware": "toy"})
        run.log_data("runs", "0123456789abcdef", "training")
        versions = [run.publish(tmp_path / "p", "toy", {"hardware": "toy"}) for _ in range(2)]
    assert versions == ["1", "2"]
    op = Op("gelu", (1000,), "fp32")
    loaded = load_registered("toy", uri)
    assert loaded.kernel.seconds([op], 1) == pytest.approx(predictor.kernel.seconds([op], 1), rel=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {"p", "mlflow.db", "mlartifacts"}
    with pytest.raises(PredictorError, match="must hold stepsight-other@champion"):
        load_registered("other", uri)
    with pytest.raises(RuntimeError, match="broken"), tracked(uri, "toy"):
        raise RuntimeError("broken")


def test_an_impossible_store_is_refused_at_once() -> None:
    """A URI that MLflow does not know is the user's mistake."""
    with pytest.raises(PredictorError, match="foo://x"), tracked("foo://x", "run"):
        raise AssertionError("nothing may be learned for a store that is none")
