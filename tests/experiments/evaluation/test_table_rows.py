from __future__ import annotations

from pathlib import Path

import pytest

from stepsight.dataset.base.errors import TableError
from stepsight.experiments.evaluation.evaluate import evaluate
from stepsight.experiments.evaluation.row_jobs import jobs_of, preset_of_device
from stepsight.experiments.evaluation.runs_table import Row, read_runs_table

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
    row = ROW.format(nodes=1, gpus=8, framework="x", batch=64, seconds=1).replace("dlrm_dcnv2", "others,dlrm")
    path.write_text(HEADER.replace("benchmark", "tables,family") + row)
    with pytest.raises(TableError, match="tables must be one of criteo-multihot-dcnv2 or a file"):
        evaluate(path)


def test_a_benchmark_whose_model_is_not_known_is_named(tmp_path: Path) -> None:
    """Also on devices that are not known."""
    path = tmp_path / "runs.csv"
    row = ROW.format(nodes=1, gpus=8, framework="x", batch=64, seconds=1).replace("dlrm_dcnv2", "stable_diffusion")
    path.write_text(HEADER + row + row.replace("NVIDIA H100-SXM5-80GB", "TPU-trillium"))
    with pytest.raises(
        TableError, match=r"2 x no model is known for the benchmark 'stable_diffusion' .known: criteo-multihot-dcnv2"
    ):
        evaluate(path)


@pytest.mark.parametrize(
    ("accelerator", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIe-80GB", "a100-pcie-80gb"),
        ("NVIDIA H100-SXM-80GB", "h100-sxm-80gb"),
        ("NVIDIA H100-PCIe-80GB", "h100-pcie-80gb"),
        ("NVIDIA H100-NVL-94GB", "h100-nvl-94gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H200-NVL-141GB", "h200-nvl-141gb"),
        ("NVIDIA H200-SXM5-141GB", "h200-sxm-141gb"),
        ("NVIDIA L40S", "l40s-pcie-48gb"),
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200-sxm-180gb"),
        ("NVIDIA Blackwell GPU (GB200)", "gb200-sxm-186gb"),
        ("NVIDIA Blackwell Ultra GPU (B300-SXM-270GB)", "b300-sxm-270gb"),
        ("NVIDIA Blackwell Ultra GPU (GB300)", "gb300-sxm-279gb"),
    ],
)
def test_devices_in_the_words_of_mlperf(accelerator: str, preset: str) -> None:
    assert preset_of_device(Row({"hardware": accelerator})) == preset


def test_a_larger_batch_takes_longer(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = [ROW.format(nodes=8, gpus=64, framework="HugeCTR", batch=b, seconds=0.003) for b in (65536, 135168)]
    path.write_text(HEADER + "".join(rows))
    small, large = (row.predicted_s for row in evaluate(path).scored)
    assert small < large < 2.1 * small


LORA = (
    "round,org,benchmark,accelerator,gpus_per_node,nodes,gpus,framework,layers,hidden,ffn,heads,kv_heads,vocab,seq,"
    "family,global_batch,tp,pp,cp,vp,micro_batch,dp,precision,tp_overlap,recompute,step_s,tokens_per_s_per_gpu\n"
    "v4.1,me,llama2_70b_lora,NVIDIA H100-SXM5-80GB,8,8,64,PyTorch,80,8192,28672,64,8,32000,8192,llama-lora,8,4,1,2,0,"
    "1,8,bf16?,0,,0.55,1850\n"
    "v4.0,me,llama2_70b_lora,NVIDIA H100-SXM5-80GB,8,8,64,PyTorch,80,8192,28672,64,8,32000,8192,llama-lora,8,4,1,2,0,"
    "1,8,fp8,True,,0.63,1600\n"
    "v5.1,me,llama2_70b_lora,AMD Instinct MI325X 256GB HBM3E DLC,8,1,8,ROCm,80,8192,28672,64,8,32000,8192,llama-lora,8,"
    "1,1,1,0,1,8,fp8,False,,2.9,2800\n"
)


def test_rows_of_mlperf_lora_are_jobs(tmp_path: Path) -> None:
    """Adapters, precision and overlap are those of the reference and of the submitted configurations."""
    path = tmp_path / "runs.csv"
    path.write_text(LORA)
    later, first, amd = (jobs_of(row)[0].job for row in read_runs_table(path))
    for job in (later, first, amd):
        assert (job.model.lora_rank, job.model.lora_targets, job.model.lora_dropout) == (16, ("qkv", "proj"), 0.1)
        assert job.batch.precision == "fp8" and job.batch.fp8_activations and job.framework == "nemo"
        assert job.parallel.zero_stage == 1 and not job.parallel.overlap_grad_reduce
    assert [job.batch.fp8_attention for job in (later, first, amd)] == [True, False, False]
    assert [job.parallel.overlap_tp for job in (later, first)] == ["", "split"]
    assert (later.execution.date, first.execution.date) == ("2024-10", "2024-05")
    assert amd.cluster.hardware == "mi325x-256gb"


SCHEDULES = "kind,model,hardware,gpus,strategy,pp,vpp,schedule,tokens_s_device\n"
SCHEDULED = "schedule comparison,Llama2-7B,MI300X,8,PP8,8,{vpp},{schedule},10000\n"


def test_rows_of_schedules_are_jobs(tmp_path: Path) -> None:
    """Tokens per second and device are an iteration time; a schedule that jobs do not have is told."""
    path = tmp_path / "runs.csv"
    words = [(1, "1f1b"), (2, "1f1b-interleaved(vpp2)"), (2, "zbb"), (2, "zbv"), (2, "v-half")]
    path.write_text(SCHEDULES + "".join(SCHEDULED.format(vpp=vpp, schedule=word) for vpp, word in words))
    result = evaluate(path)
    found = [(row.job.parallel.schedule, row.job.parallel.virtual_stages) for row in result.scored]
    assert found == [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2)]
    assert result.scored[0].measured_s == pytest.approx(32 * 4096 / (8 * 10000))
    (why,) = result.skipped
    assert why.startswith("parallel.schedule must be one of")


def test_a_table_without_sizes_and_sharding_says_so(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("chip,model,chips,gbs,seq,precision,step_s,source\nTPU v5p,llama3-8b,64,64,8192,bf16,1.0,recipes\n")
    with pytest.raises(
        TableError, match=r"lacks framework, family, layers, hidden, micro_batch, and states no sharding"
    ):
        read_runs_table(path)
