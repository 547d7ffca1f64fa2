"""Predicting from a saved predictor starts fast: it needs neither PyTorch nor LightGBM nor MLflow."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from stepsight.training.predictor.predictor import Predictor
from tests.gnn.random_networks import random_network

SCRIPT = """
import sys
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.predictor import Predictor
job = Job(
    model=ModelSpec(family="gpt", layers=2, hidden=128, heads=4, vocab=512, seq_len=64), parallel=ParallelSpec(),
    batch=BatchSpec(micro_batch=1, global_batch=2, precision="fp32"),
    cluster=ClusterSpec(hardware="toy", devices_per_node=2, fabric="loopback"),
)
predict(job, Predictor.load(sys.argv[1]))
print(*sorted({"torch", "torch_geometric", "lightgbm", "mlflow", "pandas"} & set(sys.modules)))
"""


def test_predicting_imports_nothing_heavy(predictor: Predictor, tmp_path: Path) -> None:
    replace(predictor, context=random_network()).save(tmp_path / "p")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "p")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
