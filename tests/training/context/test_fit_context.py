from dataclasses import replace

import numpy as np
import pytest

from stepsight.dataset.graph.program import Node, Program
from stepsight.dataset.hardware.hardware import Hardware, find_fabric
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.kinds.op import Op
from stepsight.features.node_features import SegmentGraph
from stepsight.gnn.context_model import mean_network
from stepsight.gnn.contexts import FORMS
from stepsight.training.context.fit_context import Example, Iteration, fit_context, op_error
from stepsight.training.predictor.predictor import Predictor

Measured = tuple[list[Example], list[Iteration], list[Example], list[Iteration]]


def _job(layers: int, hidden: int, dp: int) -> Job:
    return Job(
        model=ModelSpec(family="gpt", layers=layers, hidden=hidden, heads=4, vocab=512, seq_len=64),
        parallel=ParallelSpec(dp=dp),
        batch=BatchSpec(micro_batch=2, global_batch=4, precision="fp32"),
        cluster=ClusterSpec(hardware="toy", devices_per_node=dp, fabric="loopback"),
    )


def _truth(program: Program, alone: np.ndarray) -> np.ndarray:
    """Element-wise ops run 30 % slower in a training step, and everything beside a collective 15 %."""
    slow = [1.3 if getattr(node.work, "family", "") == "elementwise" else 1.0 for node in program.nodes]
    beside = 1.15 if len(program.streams) > 1 else 1.0
    return alone * np.array(slow) * beside


def _measured(
    predictor: Predictor, hardware: Hardware, sizes: list[tuple[int, int, int]]
) -> tuple[list[Example], list[Iteration]]:
    examples, wholes = [], []
    rng = np.random.default_rng(0)
    for layers, hidden, dp in sizes:
        job = _job(layers, hidden, dp)
        iteration = Iteration(job, predictor.latency(job))
        alone, bounds = iteration.alone, iteration.bounds
        parts = np.split(alone, bounds[1:-1])
        inside = [_truth(p, a) for p, a in zip(iteration.lowered.programs, parts, strict=True)]
        for program, before, after in zip(iteration.lowered.programs, parts, inside, strict=True):
            noisy = after * np.exp(rng.normal(0, 0.05, len(after)))
            examples.append(Example(SegmentGraph(program, hardware, dp), before, noisy, job.name))
        seconds, _ = iteration.seconds_and_counts(np.concatenate(inside))
        wholes.append(replace(iteration, measured_s=seconds, busy=dp, run=job.name))
    return examples, wholes


@pytest.fixture(scope="module")
def measured(predictor: Predictor, hardware: Hardware) -> Measured:
    assert find_fabric("loopback")
    train = _measured(predictor, hardware, [(2, 128, 1), (3, 256, 1), (2, 128, 2), (3, 192, 2), (4, 128, 2)])
    heldout = _measured(predictor, hardware, [(3, 160, 1), (4, 224, 2)])
    return *train, *heldout


def _iteration_error(wholes: list[Iteration], predictor: Predictor) -> float:
    off = []
    for whole in wholes:
        bounds = whole.bounds
        parts = np.split(whole.alone, bounds[1:-1])
        latency = predictor.latency(whole.job)
        inside = np.concatenate(latency.in_context(whole.lowered.programs, parts))
        off.append(abs(np.log(whole.seconds_and_counts(inside)[0] / whole.measured_s)))
    return float(np.mean(off))


@pytest.mark.parametrize("form", ["table", "features", "graph"])
def test_traces_teach_every_level_ops_of_jobs_it_never_saw(measured: Measured, form: str) -> None:
    train, _, heldout, _ = measured
    context = mean_network([fit_context(train, [], epochs=60)], FORMS[form])
    assert op_error(heldout, context) < 0.6 * op_error(heldout, None)


def test_the_table_learns_a_factor_of_each_kind(measured: Measured, hardware: Hardware) -> None:
    context = mean_network([fit_context(measured[0], [])], FORMS["table"])
    program = Program((Node(Op("gelu", (4096,), "fp32")), Node(Op("linear", (64, 64, 64), "fp32"))), (), "forward")
    slow, plain = np.log(context(SegmentGraph(program, hardware, 1), np.ones(2)))
    assert slow - plain == pytest.approx(np.log(1.3), abs=0.05)


@pytest.mark.parametrize("form", ["table", "features", "graph"])
def test_whole_iterations_alone_teach_it_too(measured: Measured, predictor: Predictor, form: str) -> None:
    _, train, _, heldout = measured
    taught = replace(predictor, context=mean_network([fit_context([], train, epochs=40)], FORMS[form]))
    assert _iteration_error(heldout, taught) < 0.6 * _iteration_error(heldout, predictor)


def test_training_is_deterministic(measured: Measured) -> None:
    train, wholes, _, _ = measured
    one, two = (fit_context(train[:3], wholes[:1], epochs=3).state_dict() for _ in range(2))
    assert all((one[name] == two[name]).all() for name in one)
