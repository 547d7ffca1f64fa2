"""Kinds that are added later change no answer of a predictor that was trained before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.base.errors import JobError, PredictorError
from stepsight.dataset.graph.program import ProgramBuilder
from stepsight.dataset.hardware.hardware import find_fabric
from stepsight.dataset.job.job import Job
from stepsight.dataset.kinds import COLLECTIVE_KINDS, OP_KINDS, CollectiveKind, OpKind
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.features.node_features import SegmentGraph, node_feature_names, op_feature_names
from stepsight.gnn.contexts import ContextNetwork
from stepsight.training.kernels.kernel_models import fit_kernels
from stepsight.training.prediction.prediction import predict
from stepsight.training.predictor.model_tables import write_manifest
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import teaching_names
from tests.gnn.random_networks import random_network

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))
DIMS = tuple(f"dim{i}" for i in range(max(8, 1 + max(len(kind.dim_names) for kind in OP_KINDS.values()))))
OPS = [Op("linear", (100, 200, 300), "fp32"), Op("layer_norm", (96, 320), "fp32"), Op("gelu", (50_000,), "fp32")]
FABRIC = find_fabric("loopback")
COLLECTIVES = [Collective("all_reduce", 12345, 2, 2)]


def scan() -> OpKind:
    """A kind with more dims than any other, whose code comes before those of the package's next kinds."""
    return OpKind(
        name="scan",
        family="scan",
        dim_names=DIMS,
        flops=lambda *dims: 2.0 * np.prod(dims, dtype=float),
        elements=lambda *dims: float(np.prod(dims, dtype=float)),
        in_harness=False,
    )


@contextmanager
def more_kinds() -> Iterator[None]:
    """Within the block there are one more op kind and one more collective kind."""
    with ExitStack() as stack:
        stack.enter_context(OP_KINDS.registered("scan", scan()))
        stack.enter_context(COLLECTIVE_KINDS.registered("gossip", CollectiveKind(name="gossip", counts="the message")))
        yield


def _seconds(predictor: Predictor) -> list[float | str]:
    """Iteration times of all examples as if they ran on the predictor's hardware; a loaded predictor has no caches."""
    found: list[float | str] = []
    for path in EXAMPLES:
        job = Job.from_file(path)
        job = replace(job, cluster=replace(job.cluster, hardware=predictor.hardware.name))
        try:
            found.append(predict(job, predictor).iteration_time_s)
        except JobError as error:  # hardware without the job's dtype
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", teaching_names())
def test_shipped_predictors_answer_bit_for_bit(name: str) -> None:
    before = _seconds(Predictor.load(name))
    in_8_bits = sum(Job.from_file(path).batch.precision == "fp8" for path in EXAMPLES)
    assert sum(isinstance(seconds, float) for seconds in before) >= len(EXAMPLES) - in_8_bits
    with more_kinds():
        assert f"log_dim{len(DIMS) - 1}" in op_feature_names() and Op("scan", (1,) * len(DIMS)).record.code >= 1000
        assert _seconds(Predictor.load(name)) == before
    assert _seconds(Predictor.load(name)) == before


def test_a_predictor_trained_before_is_loaded_and_answers_after(predictor: Predictor, tmp_path: Path) -> None:
    """Also one that is loaded while the kinds are there and asked when they are gone."""
    predictor.save(tmp_path / "p")
    before = Predictor.load(tmp_path / "p")
    ops, collectives = before.kernel.seconds(OPS, 2), before.collective.seconds(COLLECTIVES, FABRIC)
    with more_kinds():
        after = Predictor.load(tmp_path / "p")
        assert after.kernel.seconds(OPS, 2).tolist() == ops.tolist()
        assert after.collective.seconds(COLLECTIVES, FABRIC).tolist() == collectives.tolist()
        assert "no scan was measured" in after.kernel.unsupported(Op("scan", (2,) * len(DIMS), "fp32"))
    assert after.kernel.seconds(OPS, 2).tolist() == ops.tolist()


def test_a_context_model_trained_before_is_loaded_and_answers_after(predictor: Predictor, tmp_path: Path) -> None:
    replace(predictor, context=random_network()).save(tmp_path / "p")
    builder = ProgramBuilder("backward")
    for work in (*OPS, *COLLECTIVES):
        builder.add(work)
    program, alone = builder.build(), np.full(4, 2e-4)
    loaded = Predictor.load(tmp_path / "p").context
    assert loaded is not None
    before = loaded(SegmentGraph(program, predictor.hardware, 2), alone)
    names = node_feature_names()
    with more_kinds():
        assert set(node_feature_names()) - set(names) == {"kind=scan", "kind=gossip"}
        after = Predictor.load(tmp_path / "p").context
        assert after is not None
        assert after(SegmentGraph(program, predictor.hardware, 2), alone).tolist() == before.tolist()
        builder.add(Op("scan", (2,) * len(DIMS), "fp32"))
        assert np.isfinite(after(SegmentGraph(builder.build(), predictor.hardware, 2), np.full(5, 2e-4))).all()


def test_a_context_model_trained_with_a_kind_answers_without_it(predictor: Predictor, tmp_path: Path) -> None:
    """No program holds the kind, so its feature is 0, as it was where the kind did not occur."""
    with more_kinds():
        replace(predictor, context=random_network()).save(tmp_path / "p")
    context = Predictor.load(tmp_path / "p").context
    assert isinstance(context, ContextNetwork) and "kind=scan" in context.features


def test_what_is_trained_with_other_kinds_about_says_the_same(predictor: Predictor) -> None:
    """A kind that no row holds adds columns of zeros, which no split reads."""
    rng = np.random.default_rng(0)
    ops = [Op("linear", tuple((16 * rng.integers(1, 60, 3)).tolist()), "fp32") for _ in range(60)]
    seconds = np.array([op.flops * 1e-12 + 1e-5 for op in ops]) * np.exp(0.2 * rng.normal(size=60))
    before = fit_kernels(ops, 1, seconds, predictor.hardware).seconds(OPS[:1], 1)
    with more_kinds():
        model = fit_kernels(ops, 1, seconds, predictor.hardware)
    assert model.seconds(OPS[:1], 1).tolist() == before.tolist()


def _trained_on_scan(predictor: Predictor, folder: Path) -> None:
    rng = np.random.default_rng(0)
    ops = [Op("scan", tuple(rng.integers(1, 9, len(DIMS)).tolist()), "fp32") for _ in range(60)]
    seconds = np.array([1e-5 * (1 + op.dims[-1]) for op in ops])
    kernel = fit_kernels(ops, 1, seconds, predictor.hardware)
    replace(predictor, kernel=kernel).save(folder)


def test_a_kind_that_is_not_there_is_named(predictor: Predictor, tmp_path: Path) -> None:
    with more_kinds():
        _trained_on_scan(predictor, tmp_path / "p")
        Predictor.load(tmp_path / "p")
    with pytest.raises(PredictorError, match=r"kinds that this version does not have: scan: register them"):
        Predictor.load(tmp_path / "p")


def test_a_kind_with_another_code_is_named(predictor: Predictor, tmp_path: Path) -> None:
    with more_kinds():
        _trained_on_scan(predictor, tmp_path / "p")
    with (
        OP_KINDS.registered("scan", replace(scan(), code=99)),
        pytest.raises(PredictorError, match=r"trained with, got scan \d+ != 99: register"),
    ):
        Predictor.load(tmp_path / "p")


def test_features_that_are_not_there_are_named(predictor: Predictor, tmp_path: Path) -> None:
    """A kind of fewer dims under the same name leaves a split without its feature."""
    with more_kinds():
        _trained_on_scan(predictor, tmp_path / "p")
    fewer = replace(scan(), dim_names=DIMS[:-1])
    with (
        OP_KINDS.registered("scan", fewer),
        pytest.raises(PredictorError, match=f"does not have: log_dim{len(DIMS) - 1}: register"),
    ):
        Predictor.load(tmp_path / "p")


@pytest.mark.parametrize(
    ("file", "keys", "value", "message"),
    [
        ("kernel.json", ("features", "version"), 2, "a regressor must read features of version 1, got version 2"),
        ("kernel.json", ("features", "terms"), ["calls", "flop"], "fitted to the terms calls, .* got calls, flop"),
        ("gnn.json", ("features_version",), 2, "must read features of version 1, got version 2"),
        ("gnn.json", ("features",), ["busy", "log_tides"], "features that this version does not have: log_tides"),
        ("gnn.json", ("features",), ["busy", "busy"], "must name every feature once"),
        ("gnn.json", ("relations",), ["echo"], "must hear some of .*stream_order, .* got"),
    ],
)
def test_another_version_is_refused(
    predictor: Predictor, tmp_path: Path, file: str, keys: tuple[str, ...], value: object, message: str
) -> None:
    folder = tmp_path / "p"
    replace(predictor, context=random_network()).save(folder)
    table = json.loads((folder / file).read_text())
    at = table
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (folder / file).write_text(json.dumps(table))
    write_manifest(folder, json.loads((folder / "manifest.json").read_text()), predictor.hardware.name)
    with pytest.raises(PredictorError, match=message):
        Predictor.load(folder)


def test_a_predictor_from_before_features_were_named_is_read(predictor: Predictor, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    predictor.save(folder)
    for file in ("kernel.json", "collective.json"):
        table = json.loads((folder / file).read_text())
        del table["features"]
        (folder / file).write_text(json.dumps(table))
    write_manifest(folder, json.loads((folder / "manifest.json").read_text()), predictor.hardware.name)
    expected = predictor.kernel.seconds(OPS, 2)
    assert Predictor.load(folder).kernel.seconds(OPS, 2) == pytest.approx(expected, rel=1e-5)
