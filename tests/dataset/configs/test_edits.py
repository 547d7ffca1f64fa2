"""A user's configuration with another strategy: what does not change stays as it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
    assert edited is not None and edit_config(path, job, job, to) == text
    lines = diff_text(path, tmp_path / "new", edited).splitlines()
    new = "\n".join(line for line in lines if line[0] == "+")
    assert all(words in new for words in added) and 2 < len(lines) < 16


def test_a_file_of_another_form_is_not_changed(tmp_path: Path) -> None:
    """One that states no model, or arguments that stand in YAML."""
    (tmp_path / "a.yaml").write_text(published.MIXTRAL)
    job = read_configs([tmp_path / "a.yaml"]).job
    assert not edit_config(tmp_path / "a.yaml", job, job, "megatron")
    (tmp_path / "own.toml").write_text(published.TITAN)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    job = read_configs([tmp_path / "own.toml"]).job
    assert not edit_config(tmp_path / "ds.json", job, job, "deepspeed")
