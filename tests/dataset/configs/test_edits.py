"""A user's configuration with another strategy: what does not change stays as it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.edits import diff_text, edit_config
from stepsight.dataset.configs.formats import read_configs
from tests.dataset.configs import test_published as published


@pytest.mark.parametrize(
    ("file", "text", "to", "changes", "added"),
    [
        ("a.txt", published.DEEPSEEK, "megatron", {"zero_stage": 1}, {"--use-distributed-optimizer"}),
        ("a.toml", published.TITAN, "torchtitan", {"pp": 2, "dp": 8}, {"pipeline_parallel_degree = 2"}),
        ("a.yaml", published.NANOTRON, "nanotron", {"pp": 4, "dp": 2}, {"pp: 4", "batch_accumulation_per_replica: 16"}),
        ("a.yml", published.MAXTEXT, "maxtext", {"pp": 2, "dp": 8}, {"ici_pipeline_parallelism: 2"}),
    ],
)
def test_only_what_differs_changes(
    file: str, text: str, to: str, changes: dict[str, Any], added: set[str], tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_text(text)
    job = read_configs([path]).job
    best = replace(job, parallel=replace(job.parallel, **changes))
    edited = edit_config(path, job, best, to)
    same = edit_config(path, job, job, to)
    assert edited is not None and same is not None and same.text == text
    lines = diff_text(path, tmp_path / "new", edited.text).splitlines()
    new = "\n".join(line for line in lines if line[0] == "+")
    assert all(words in new for words in added) and 2 < len(lines) < 16


def test_a_file_of_another_form_is_not_changed(tmp_path: Path) -> None:
    """One that states no model, or arguments that stand in YAML."""
    (tmp_path / "a.yaml").write_text(published.MIXTRAL)
    job = read_configs([tmp_path / "a.yaml"]).job
    assert edit_config(tmp_path / "a.yaml", job, job, "megatron") is None
    (tmp_path / "own.toml").write_text(published.TITAN)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    job = read_configs([tmp_path / "own.toml"]).job
    edited = edit_config(tmp_path / "ds.json", job, job, "deepspeed")
    assert edited is not None and not edited.text


LAUNCH = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py "
MODEL = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --bf16 "
SCRIPT = (
    f"# --tensor-model-parallel-size 4 is slower\nTP=8\nETP=8\n{LAUNCH}{MODEL}--tensor-model-parallel-size 2\n"
    f"{LAUNCH}{MODEL}--tensor-model-parallel-size $TP --recompute-activations --global-batch-size 64 \\\n  --lr 1\n"
)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_launch_that_is_read_is_changed(end: str, tmp_path: Path) -> None:
    """The one with the most options; comments, the other launch and line ends stay, and the answer names the launch."""
    (path := tmp_path / "run.sh").write_bytes(SCRIPT.replace("\n", end).encode())
    job = read_configs([path]).job
    assert job.parallel.tp == 8
    best = replace(job, parallel=replace(job.parallel, tp=4, dp=4, recompute="none", zero_stage=1))
    edited = edit_config(path, job, best, "megatron-script")
    assert edited is not None and "2 launches: number 2 is read" in edited.notes[0]
    changed = SCRIPT.replace("TP=8\nE", "TP=4\nE").replace("--recompute-activations ", "")
    where = changed.rindex("--micro-batch-size")
    changed = f"{changed[:where]}--use-distributed-optimizer {changed[where:]}"
    assert edited.text == changed.replace("\n", end)
    other = read_configs([path], Given(pick="1"))
    assert other.job.parallel.tp == 2
    with pytest.raises(JobError, match="from 1 to 2, got '3'"):
        read_configs([path], Given(pick="3"))


def test_options_beside_brackets_are_changed(tmp_path: Path) -> None:
    """The first and the last item of an array have no blank on one side."""
    text = f"ARGS=(--micro-batch-size 1 {MODEL.replace('--micro-batch-size 1', '')} --recompute-activations)\n"
    (path := tmp_path / "run.sh").write_text(text + LAUNCH + "${ARGS[@]} --global-batch-size 64\n")
    job = read_configs([path]).job
    edited = edit_config(
        path, job, replace(job, parallel=replace(job.parallel, recompute="none", zero_stage=1)), "megatron"
    )
    assert edited is not None and "(--use-distributed-optimizer --micro-batch-size 1 " in edited.text
    assert "recompute" not in edited.text and edited.notes == ()
    more = replace(job, cluster=replace(job.cluster, nodes=4), parallel=replace(job.parallel, dp=0))
    edited = edit_config(path, job, more, "megatron")
    assert edited is not None and edited.notes == ("--nnodes 2 stays: the strategy is for 4 nodes",)


def test_what_cannot_be_changed_is_empty(tmp_path: Path) -> None:
    """An option that a variable of another value decides: the changed file would not read as the strategy."""
    more = "--global-batch-size 64 $X --tensor-model-parallel-size 8"
    text = f'TP=8\nX="--tensor-model-parallel-size $TP"\n{LAUNCH}{MODEL}{more}\n'
    (path := tmp_path / "run.sh").write_text(text)
    job = read_configs([path]).job
    edited = edit_config(path, job, replace(job, parallel=replace(job.parallel, tp=2, dp=8)), "megatron")
    assert job.parallel.tp == 8 and edited is not None and edited.text == ""
    assert "states tensor-model-parallel-size where it cannot be changed" in edited.notes[0]


def test_a_setting_that_ends_a_quoted_text_and_one_of_another_name_are_changed(tmp_path: Path) -> None:
    """The quote stays; layers of a virtual stage, which the written settings count in stages, are taken out."""
    text = (
        f'ARGS="{MODEL}--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 64 --recompute-granularity full"'
    )
    more = 'PAR="--seed 1 --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2"'
    (path := tmp_path / "run.sh").write_text(f"{text}\n{more}\n{LAUNCH}$ARGS $PAR\n")
    job = read_configs([path]).job
    assert job.parallel.virtual_stages == 2
    for changes in ({"pp": 1, "virtual_stages": 1, "dp": 8}, {"pp": 2, "virtual_stages": 4, "dp": 4}):
        best = replace(job, parallel=replace(job.parallel, **changes, tp=2, recompute="none"))  # type: ignore[arg-type]
        edited = edit_config(path, job, best, "megatron-script")
        assert edited is not None and edited.text.count('"') == 4 and '--tensor-model-parallel-size 2"' in edited.text
        assert "per-virtual" not in edited.text and "recompute" not in edited.text and "--seed 1" in edited.text
