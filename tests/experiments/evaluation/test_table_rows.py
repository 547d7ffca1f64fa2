from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.experiments.evaluation.row_jobs import jobs_of
from stepsight.experiments.evaluation.runs_table import read_runs_table

HEADER = "org,accelerator,gpus_per_node,nodes,gpus,framework,benchmark,gbs,step_s_median\n"
ROW = "me,NVIDIA H100-SXM5-80GB,8,{nodes},{gpus},{framework},dlrm_dcnv2,{batch},{seconds}\n"


def test_rows_of_mlperf_are_jobs(tmp_path: Path) -> None:
    """Without sizes of a model, layout or precision: those of the reference and of HugeCTR."""
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + ROW.format(nodes=2, gpus=16, framework="Merlin HugeCTR", batch=65536, seconds=0.004))
    (found,) = jobs_of(read_runs_table(path)[0])
    job = found.job
    assert len(job.model.tables) == 26 and job.batch.micro_batch == 4096 and job.batch.precision == "fp16"
    assert found.framework.name == "hugectr" and job.sharding.hierarchical and job.execution.op_calls == 0


def test_tables_of_a_row_may_be_a_file(tmp_path: Path) -> None:
    tables = tmp_path / "tables.csv"
    tables.write_text("rows,dim,pooling\n100000,64,4\n5000,64,1\n")
    path = tmp_path / "runs.csv"
    path.write_text(
        "source,hardware,gpus,framework,family,tables,global_batch,iteration_time,precision\n"
        f"me,h100-sxm-80gb,8,torchrec,dlrm,{tables},8192,0.01,fp32\n"
    )
    result = evaluate(path)
    assert result.scored[0].job.model.interaction == "dot" and result.scored[0].framework.name == "torchrec"


def test_unknown_tables_are_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        HEADER.replace("benchmark", "tables") + ROW.format(nodes=1, gpus=8, framework="x", batch=64, seconds=1)
    )
    path.write_text(path.read_text().replace("dlrm_dcnv2", "others"))
    with pytest.raises(TableError, match="tables must be one of criteo-multihot-dcnv2 or a file"):
        evaluate(path)


def test_a_larger_batch_takes_longer(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = [ROW.format(nodes=8, gpus=64, framework="HugeCTR", batch=b, seconds=0.003) for b in (65536, 135168)]
    path.write_text(HEADER + "".join(rows))
    small, large = (row.predicted_s for row in evaluate(path).scored)
    assert small < large < 2.1 * small
