"""Imported runs teach ops in their context; opaque kernels, and what has unknown sizes, teach nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.graph.program import Node, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.kinds.op import Op
from stepsight.dataset.runs.run_folder import write_imported
from stepsight.dataset.traces.import_traces import import_ranks
from stepsight.gnn.context_model import mean_network
from stepsight.gnn.contexts import FORMS
from stepsight.training.context.fit_context import fit_context, make_examples, node_weights, op_error
from stepsight.training.measured.imported_ops import imported_times
from stepsight.training.measured.measured import read_imported_runs
from stepsight.training.predictor.predictor import Predictor
from tests.dataset.traced_jobs import two_ranks


def test_what_nobody_knows_teaches_nothing(tmp_path: Path, predictor: Predictor) -> None:
    paths = [file.write(tmp_path / f"{place}.json") for place, file in enumerate(two_ranks())]
    for name, some in (("both", paths), ("one", paths[:1])):
        found = import_ranks(some)
        write_imported(found.graphs, found.sources, tmp_path / name, None, found.warnings)
    known = {}
    for name in ("both", "one"):
        examples = make_examples(read_imported_runs([tmp_path / name]), predictor)
        pairs = [
            (node.work.kind, bool(k)) for e in examples for node, k in zip(e.graph.program.nodes, e.known, strict=True)
        ]
        known[name] = {kind for kind, taught in pairs if taught}
        assert {kind for kind, taught in pairs if not taught} >= {"opaque"}
        assert all((example.alone > 0).all() for example in examples)
        assert len(node_weights(examples)) == sum(int(example.known.sum()) for example in examples)
    assert known["both"] - known["one"] == {"all_reduce"} and "linear" in known["one"]
    context = mean_network([fit_context(examples, [], epochs=2)], FORMS["graph"])
    assert op_error(examples, context) > 0
    assert sum(node_weights(examples)) == pytest.approx(1.0)
    assert not np.isnan(context.tensors["heads.graph.direct.weight"]).any()


def test_ops_with_a_flag_of_0_teach(tmp_path: Path, predictor: Predictor) -> None:
    """Attention without a mask was once taken for an op of unknown sizes, as pools are whose output no trace tells."""
    found = import_ranks([two_ranks()[0].write(tmp_path / "0.json")])
    write_imported(found.graphs, found.sources, tmp_path, None, found.warnings)
    works = [Op("attention", (2, 4, 4, 8, 8, 16, flag), "fp32") for flag in (1, 0)] + [Op("pool", (8, 64, 0), "fp32")]
    program = Program(tuple(map(Node, works)), (), "forward")
    segment = TracedSegment(program, np.full(3, 1e-4), "forward", 0, 1, "bert", alone_s=np.full(3, np.nan))
    (run,) = (replace(run, segments=(segment,)) for run in read_imported_runs([tmp_path]))
    assert make_examples([run], predictor)[0].known.tolist() == [True, True, False]
    assert [*imported_times([run])] == works[:2]
