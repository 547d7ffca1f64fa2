import numpy as np
import pytest
import torch

from stepsight.dataset.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.gnn.model import ContextModel
from stepsight.training.latency import LearnedLatency
from stepsight.training.predictor import Predictor
from tests.simulator.latency_contract import LatencyContract, small_program


def _job() -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=2, hidden=128, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(),
        batch=BatchSpec(micro_batch=1, global_batch=2, precision="fp32"),
        cluster=ClusterSpec(hardware="toy", devices_per_node=2, fabric="loopback"),
    )


class TestLearnedLatency(LatencyContract):
    """With regressors and a context model of random weights."""

    @pytest.fixture
    def latency(self, predictor: Predictor) -> LearnedLatency:
        torch.manual_seed(0)
        model = ContextModel()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        taught = Predictor(predictor.hardware, predictor.kernel, predictor.collective, model.weights())
        return taught.latency(_job())


def test_a_program_is_worked_out_once(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ContextModel().weights()
    calls = []
    monkeypatch.setattr(type(context), "log_correction", lambda *a: calls.append(1) or np.zeros(len(a[1])))
    latency = Predictor(predictor.hardware, predictor.kernel, predictor.collective, context).latency(_job())
    program = small_program()
    alone = np.full(len(program), 1e-4)
    for _ in range(3):
        latency.in_context([program], [alone.copy()])
    latency.in_context([program], [alone * 2])
    assert len(calls) == 2
