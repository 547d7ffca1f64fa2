from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.formats import read_configs, write_config, written_formats
from stepsight.dataset.job.job import Job

FLAGS = {
    "facebookresearch": (
        'python dlrm_s_pytorch.py --arch-sparse-feature-size=64 --arch-mlp-bot="13-512-64" --arch-mlp-top=512-1 \\\n'
        '  --arch-embedding-size="10000-300-8" --num-indices-per-lookup=4 --mini-batch-size=2048 --print-freq=10\n'
    ),
    "torchrec": (
        "torchrun dlrm_main.py --embedding_dim 64 --dense_arch_layer_sizes 512,64 --over_arch_layer_sizes 512,1 "
        "--num_embeddings_per_feature 10000,300,8 --multi_hot_sizes 4,4,4 --batch_size 256\n"
    ),
    "nvidia": (
        "python -m dlrm.scripts.main --embedding_dim 64 --bottom_mlp_sizes 512,64 --top_mlp_sizes 512,1 "
        "--synthetic_dataset_table_sizes 10000,300,8 --batch_size 2048 --amp\n"
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_three_dlrms_state_one_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(FLAGS[name])
    found = read_configs(path)
    assert found.job.batch.global_batch == 2048 and found.job.batch.micro_batch == 256
    assert [table.rows for table in found.job.model.tables] == [10000, 300, 8]
    assert found.job.model.bottom_mlp == (512, 64) and found.job.model.top_mlp == (512, 1)
    assert {table.pooling for table in found.job.model.tables} == ({1.0} if name == "nvidia" else {4.0})
    assert found.ignored == (("--print-freq 10",) if name == "facebookresearch" else ())


_SIZES = "--embedding_dim 8 --num_embeddings_per_feature 10,20 --over_arch_layer_sizes 8,1 --multi_hot_sizes 3,2"


@pytest.mark.parametrize(
    "launch",
    [
        "torchrun --nproc_per_node 4 --nnodes 2 dlrm_main.py",
        "torchrun --nproc-per-node=4 --nnodes=2 --rdzv_backend c10d -m torchrec_dlrm.dlrm_main",
        "torchx run -s local_cwd dist.ddp -j 2x4 --script dlrm_main.py --",
        "#SBATCH --nodes=2 --gpus-per-node=4\nsrun python dlrm_main.py",
        "NNODES=2\nGPUS_PER_NODE=4\ntorchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES dlrm_main.py",
    ],
)
def test_what_launches_a_dlrm_states_the_cluster(launch: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{launch} {_SIZES} --batch_size 16\n")
    found = read_configs(tmp_path / "run.sh")
    assert found.mapped["cluster.nodes"] == 2 and found.mapped["cluster.devices_per_node"] == 4
    assert found.job.batch.global_batch == 8 * 16


@pytest.mark.parametrize(
    ("flags", "precision"), [("", "fp32"), ("--allow_tf32", "tf32"), ("--allow_tf32 --amp", "fp16")]
)
def test_flags_state_the_precision(flags: str, precision: str, tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text(f"{_SIZES} {flags}\n")
    found = read_configs(tmp_path / "args.txt")
    assert found.job.batch.precision == precision and not found.ignored


def test_each_flag_of_a_dlrm_is_told(tmp_path: Path) -> None:
    """Also those of which only a part of a value is made, and those that set nothing."""
    flags = f"{_SIZES} --amp --bf16 --allow_tf32 --adagrad --data_size 9 --epochs 1 --interaction_type dcn"
    (tmp_path / "args.txt").write_text(f"{flags} --dense_arch_layer_sizes 8 --batch_size 2 --dcn_num_layers 3\n")
    found = read_configs(tmp_path / "args.txt")
    told = " ".join([*found.sources.values(), *found.reasons.values(), *found.ignored])
    assert [word for word in flags.split() if word.startswith("--") and word not in told] == []
    assert "--embedding_dim 8" in told and "--multi_hot_sizes 3,2" in told and "--data_size 9" in found.ignored


def test_hugectrs_layers_state_a_model(tmp_path: Path) -> None:
    path = tmp_path / "dlrm.json"
    layers = [
        {"type": "Data", "dense": {"dense_dim": 13}, "sparse": [{"slot_num": 2, "max_feature_num_per_sample": 6}]},
        {
            "type": "DistributedSlotSparseEmbeddingHash",
            "sparse_embedding_hparam": {"slot_size_array": [10000, 2], "embedding_vec_size": 128},
        },
        {"type": "FusedInnerProduct", "fc_param": {"num_output": 128}},
        {"type": "Interaction"},
        {"type": "InnerProduct", "fc_param": {"num_output": 1}},
    ]
    solver = {"batchsize": 4096, "gpu": [[0, 1, 2, 3]], "mixed_precision": 1024}
    path.write_text(json.dumps({"solver": solver, "optimizer": {"type": "SGD"}, "layers": layers}))
    found = read_configs(path)
    job = found.job
    assert [table.pooling for table in job.model.tables] == [3.0, 2.0]
    assert job.cluster.num_devices == 4 and job.batch.micro_batch == 1024 and job.optimizer.kind == "sgd"
    assert job.framework == "hugectr" and job.batch.precision == "fp16"
    assert found.ignored == ()
    solver |= {"lr_policy": "fixed", "snapshot": None}
    layers[3] |= {"name": "interaction1", "bottom": ["fc2", "sparse"]}
    path.write_text(json.dumps({"solver": solver, "optimizer": {"type": "Lamb"}, "layers": layers, "more": {"x": {}}}))
    told = ["layers.3.bottom fc2 sparse", "layers.3.name interaction1", "more.x null", "optimizer.type Lamb"]
    assert sorted(read_configs(path).ignored) == [*told, "solver.lr_policy fixed", "solver.snapshot null"]


@pytest.mark.parametrize("flag", ["--arch-mlp-bot=,", "--arch-mlp-top=inf", "--arch-mlp-top=1e999"])
def test_flags_that_are_no_sizes_are_refused(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python dlrm_s_pytorch.py --arch-sparse-feature-size=64 --arch-embedding-size=10-20 {flag}\n")
    with pytest.raises(JobError, match="must be whole numbers"):
        read_configs(path)


def test_flags_without_a_width_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python dlrm_s_pytorch.py --arch-embedding-size=10-20\n")
    with pytest.raises(JobError, match="rows and width of its tables"):
        read_configs(path)


DLRM = {
    "model": {"family": "dlrm", "tables": [{"rows": 1000, "dim": 64}, {"rows": 20, "dim": 64}], "bottom_mlp": [64]},
    "batch": {"global_batch": 1024},
    "cluster": {"hardware": "h100-sxm-80gb", "devices_per_node": 8},
}


@pytest.mark.parametrize("name", written_formats())
def test_a_framework_writes_only_models_that_it_has(name: str) -> None:
    """Tables are stated by torchrec alone, and it states nothing else: no writer makes another launch of a job."""
    gpt = Job.from_dict(
        {
            **DLRM,
            "model": {"family": "gpt", "layers": 2, "hidden": 64, "heads": 2, "vocab": 64, "seq_len": 8},
            "batch": {"micro_batch": 1, "global_batch": 8},
        }
    )
    has, misses = (Job.from_dict(DLRM), gpt) if name == "torchrec" else (gpt, Job.from_dict(DLRM))
    assert write_config(has, name).text
    with pytest.raises(JobError, match=f"^{name} has no model of the family '{misses.model.family}': it has") as raised:
        write_config(misses, name)
    assert len(str(raised.value)) < 120


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"tables": []}, "1 to 10000 tables, each with rows and dim, got 0"),
        ({"bottom_mlp": [512]}, r"got dims \[64\], and bottom_mlp ends with 512"),
        ({"tables": [{"rows": 9, "dim": 64, "pooling": 10}]}, "pooling .* must be > 0 and <= rows, got 10"),
    ],
)
def test_errors_name_the_key(model: dict[str, object], text: str) -> None:
    with pytest.raises(JobError, match=text):
        Job.from_dict({**DLRM, "model": {**DLRM["model"], **model}})


def test_many_broken_rules_make_a_short_error(tmp_path: Path) -> None:
    """The first are shown, the others counted; the file is named once."""
    tables = [{"rows": -number, "dim": 2**30, "zipf": -1} for number in range(200)]
    (tmp_path / "job.json").write_text(json.dumps({**DLRM, "model": {**DLRM["model"], "tables": tables}}))
    with pytest.raises(JobError, match=r"; and \d+ more$") as raised:
        read_configs(tmp_path / "job.json")
    assert len(str(raised.value)) < 1000 and str(raised.value).count("job.json") == 1


def test_a_plan_cuts_rows_only_as_torchrec_can() -> None:
    """Over all ranks, or over those of one node, which is another type; the rule ``auto`` keeps to it."""
    tables = [{"rows": 10**7, "dim": 64, "pooling": 80.0, "name": "hot"}, {"rows": 1000, "dim": 64, "name": "small"}]
    asked = {**DLRM, "model": {**DLRM["model"], "tables": tables}, "framework": "torchrec"}
    asked |= {"batch": {"micro_batch": 64, "global_batch": 1024, "precision": "fp32"}}
    asked |= {"cluster": {"hardware": "a100-sxm-80gb", "devices_per_node": 8, "nodes": 2}}

    def plan(*ranks: int) -> Any:
        placed = [{"name": "hot", "kind": "row-wise", "ranks": list(ranks)}] if ranks else []
        job = Job.from_dict({**asked, "sharding": {"tables": placed}})
        return next(iter(json.loads(write_config(job, "torchrec").text).values()))["hot"]

    assert plan(*range(16))["sharding_type"] == "row_wise"
    assert plan(*range(8, 16))["sharding_type"] == "table_row_wise"
    assert plan()["sharding_type"] in ("table_wise", "row_wise", "table_row_wise")
    with pytest.raises(JobError, match=r"over all 16 ranks or over the 8 of a node, and 1 lie on others \(hot\)"):
        plan(0, 1, 2, 3)
