from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.formats import read_configs

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
    assert found.ignored == (("--print_freq 10",) if name == "facebookresearch" else ())


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
    job = read_configs(path).job
    assert [table.pooling for table in job.model.tables] == [3.0, 2.0]
    assert job.cluster.num_devices == 4 and job.batch.micro_batch == 1024 and job.optimizer.kind == "sgd"
    assert job.framework == "hugectr" and job.batch.precision == "fp16"


def test_flags_without_a_width_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python dlrm_s_pytorch.py --arch-embedding-size=10-20\n")
    with pytest.raises(JobError, match="rows and width of its tables"):
        read_configs(path)
