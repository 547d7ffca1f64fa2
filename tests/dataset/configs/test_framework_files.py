"""What frameworks' own files have in them: comments, inherited defaults, models of text and images, padded sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.configs.documents import facts
from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.formats import ConfigJob, read_configs, write_config
from stepsight.dataset.configs.torchtitan_models import flavors
from stepsight.dataset.job.specs import FAMILIES, ModelSpec
from tests.dataset.configs.test_published import LLAMA, NANOTRON, num_parameters, read

BLOOM = r"""
GPT_ARGS=" \
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --micro-batch-size 2 \
    --global-batch-size 2048 --pp-partition-method 'type:transformer|embedding' --pad-vocab-size-to 250880 --bf16 \
    "
#    --universal-checkpoint \
export CMD=" \
    `pwd`/pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 $GPT_ARGS \
    "
clear; srun --jobid $SLURM_JOB_ID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
"""


def test_a_comment_of_a_script_ends_with_its_line(tmp_path: Path) -> None:
    """A backslash at the end of a comment does not make the next line a part of it."""
    job = read(tmp_path, {"tr11.slurm": BLOOM}).job
    assert (job.parallel.tp, job.parallel.pp, job.model.vocab) == (4, 12, 250880)
    assert job.parallel.stage_layers == (5, *(6,) * 10, 5)  # both tables count as layers
    options = "--num-layers 2 --hidden-size 64 \\\n# --bf16 \\\n--num-attention-heads 4 --seq-length 8\n"
    assert read(tmp_path, {"args.txt": options}).mapped["model.heads"] == 4


def test_only_what_a_file_states_is_mapped(tmp_path: Path) -> None:
    """Defaults of a framework are assumed, so that a reader can tell them from what the file says."""
    files: Mapping[str, Any] = {
        "llama.yml": "base_emb_dim: 4096\nbase_num_query_heads: 32\nbase_num_kv_heads: 8\nbase_mlp_dim: 14336\n",
        "args.txt": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8\n",
        "nanotron.yaml": NANOTRON,
        "llama3.toml": '[model]\nname = "llama3"\nflavor = "8B"\n',
    }
    stated = {name: set(read(tmp_path, {name: text}).mapped) for name, text in files.items()}
    assert stated["llama.yml"] == {"model.hidden", "model.heads", "model.kv_heads", "model.ffn"}
    assert stated["args.txt"] == {"model.layers", "model.hidden", "model.heads", "model.seq_len"}
    assert not {"parallel.recompute", "optimizer.kind"} & stated["nanotron.yaml"]
    assert not any(key.startswith(("parallel.", "batch.", "optimizer.")) for key in stated["llama3.toml"])


def test_maxtext_knows_models_whose_file_is_not_near(tmp_path: Path) -> None:
    run = 'base_config: "base.yml"\nmodel_name: "llama3.1-70b"\nper_device_batch_size: 6\n'
    found = read(tmp_path, {"run.yml": run})
    assert num_parameters(found.job.model) == pytest.approx(70.6, rel=3e-3)
    assert "catalogue" in found.sources["model.layers"]
    with pytest.raises(ValueError, match="compressed attention"):
        read(tmp_path, {"v4.yml": "base_emb_dim: 4096\ndecoder_block: deepseek4\nattention_type: compressed\n"})


def test_a_vocabulary_is_padded_as_nanotron_pads_it(tmp_path: Path) -> None:
    text = NANOTRON.replace("vocab_size: 32000", "vocab_size: 50277")
    assert read(tmp_path, {"config.yaml": text}).job.model.vocab == 50278


def test_the_text_of_a_model_of_images_and_text(tmp_path: Path) -> None:
    text = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --decoder-seq-length 1024\n"
    found = read(tmp_path, {"args.txt": text})
    assert found.job.model.seq_len == 1024 and any("--seq-length 256" in words for words in found.ignored)


def test_fsdp_json_beside_a_model(tmp_path: Path) -> None:
    fsdp = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True, "xla": False}
    found = read(tmp_path, {"config.json": LLAMA, "fsdp.json": fsdp})
    assert (found.job.parallel.zero_stage, found.job.parallel.recompute) == (2, "full")
    assert found.formats == ("huggingface", "fsdp") and "xla false" in found.ignored


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "glm4_moe", "n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "head_dim": 128},
         {"experts": 128, "shared_experts": 1, "dense_layers": 1, "expert_ffn": 1408, "head_dim": 128}),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1]},
         {"experts": 8, "dense_layers": 2}),
        ({"model_type": "deepseek_v2", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1] * 16},
         {"experts": 8, "moe_every": 2}),
        ({"model_type": "nemotron"}, {"gated_mlp": False}),
        ({"model_type": "qwen", "intermediate_size": 22016}, {"ffn": 11008}),
        ({"model_type": "chatglm", "multi_query_group_num": 2, "num_key_value_heads": None}, {"kv_heads": 2}),
    ],
)  # fmt: skip
def test_models_of_hugging_face(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(tmp_path, {"config.json": {**LLAMA, **config}})
    assert {key: found.mapped[f"model.{key}"] for key in expected} == expected
    assert found.job.model.layers == 32


def test_torchtitan_without_a_model(tmp_path: Path) -> None:
    """As it is written for a model that torchtitan does not name: the model stands in another file."""
    text = "[training]\nlocal_batch_size = 2\n[parallelism]\npipeline_parallel_degree = 2\n"
    found = read(tmp_path, {"run.toml": text})
    assert found.mapped["parallel.pp"] == 2 and "model.layers" in found.missing
    job = read(tmp_path, {"config.json": LLAMA, "run.toml": text}).job
    assert (job.parallel.pp, job.model.layers) == (2, 32)


def test_a_falcon_file_states_no_length(tmp_path: Path) -> None:
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
              "vocab_size": 65024, "multi_query": True, "num_kv_heads": 71}  # fmt: skip
    found = read(tmp_path, {"config.json": falcon})
    assert (found.assumed["model.seq_len"], found.mapped["model.kv_heads"]) == (2048, 1)


def test_layers_without_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="linear attention or state spaces"):
        read(tmp_path, {"config.json": {**LLAMA, "model_type": "qwen3_next"}})


def test_a_registry_whose_flavors_are_functions_with_arguments(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(
        "_RATIO = 3.5\n"
        "def _base(dim: int, depth: int = 32):\n"
        "    layers = []\n"
        "    for index in range(depth):\n"
        "        layers.append(Layer.Config(n_heads=32, n_kv_heads=8, hidden_dim=int(_RATIO * dim)))\n"
        "    return Model.Config(dim=dim, n_layers=depth, vocab_size=128256, layers=layers)\n"
        "def _8b():\n    return _base(4096)\n"
        'configs = {"8B": _8b}\n'
    )
    registry = 'def run() -> Trainer.Config:\n    return Trainer.Config(model_spec=model_registry("8B"))\n'
    model = read(tmp_path, {"config_registry.py": registry}).job.model
    assert (model.layers, model.hidden, model.heads, model.ffn) == (32, 4096, 32, 14336)
    (tmp_path / "__init__.py").write_text("from x import GatedDeltaNet\ny = GatedDeltaNet\n")
    with pytest.raises(ValueError, match="got GatedDeltaNet"):
        read(tmp_path, {"config_registry.py": registry})


def test_a_deepspeed_file_that_accelerate_names_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "yaml").mkdir()
    path = tmp_path / "yaml" / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ../ds/zero3.json}\n")
    found: ConfigJob = read_configs([path], Given())
    assert found.mapped["parallel.zero_stage"] == 3


def test_facts_of_frameworks_are_sound() -> None:
    """Sizes are keys of a job's model, every type has a family, and no type has two."""
    keys = set(ModelSpec.__annotations__)
    assert all(set(sizes) <= keys for table in flavors().values() for sizes in table.values())
    kinds = facts()["transformers"]["kinds"]
    assert {kind["family"] for kind in kinds} <= set(FAMILIES)
    types = [name for kind in kinds for name in kind["types"]]
    assert len(types) == len(set(types)) and not set(types) & set(facts()["transformers"]["without_attention"])


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        ("--fp8-format hybrid --fp8-param-gather", {"precision": "fp8", "fp8_parameters": True}),
        ("--fp4-format e2m1 --fp4-param-gather", {"precision": "nvfp4", "fp8_parameters": True}),
        ("--fp8-param-gather", {"precision": "bf16", "fp8_parameters": False}),  # which has no effect
        ("--cpu-offloading --cpu-offloading-num-layers 3", {"offload_activations": True, "offload_layers": 3}),
        ("--cpu-offloading-num-layers 3", {"offload_activations": False, "offload_layers": 0}),
    ],
)
def test_narrow_parameters_and_offloaded_layers(words: str, stated: dict[str, Any], tmp_path: Path) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --bf16"
    (tmp_path / "a.txt").write_text(f"{sizes} {words}\n")
    found = read_configs(tmp_path / "a.txt")
    assert {name: getattr(found.job.batch, name, getattr(found.job.parallel, name, None)) for name in stated} == stated
    back = write_config(found.job, "megatron").text
    assert all(word in back for word in words.split()) == (True in stated.values())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("stated", "precision", "mbytes"),
    [
        ({"tf32": True}, "tf32", 50.0),
        ({"tf32": True, "bf16": True}, "bf16", 50.0),
        ({"fsdp": "full_shard"}, "bf16", 25.0),
    ],
)
def test_training_arguments_state_products_and_buckets(
    stated: dict[str, object], precision: str, mbytes: float, first: bool, tmp_path: Path
) -> None:
    """In either order of the files; buckets are those of DDP alone, and half precision goes before tf32."""
    files = {"t.json": {"output_dir": "x", "num_train_epochs": 3, "ddp_bucket_cap_mb": 50, **stated}}
    found = read(tmp_path, {**files, "config.json": LLAMA} if first else {"config.json": LLAMA, **files})
    assert (found.job.batch.precision, found.job.parallel.bucket_mbytes) == (precision, mbytes)
    assert ("tf32 true" in found.ignored) == (precision == "bf16" and "tf32" in stated)
    assert ("ddp_bucket_cap_mb 50" in found.ignored) == ("fsdp" in stated)


def test_settings_of_a_key_that_is_set_again_are_listed(tmp_path: Path) -> None:
    """By another file of the run, and by the user: no words of a key name them any more."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 1000}
    model = {"model_type": "llama", **sizes, "intermediate_size": 4096, "torch_dtype": "float16"}
    (config := tmp_path / "config.json").write_text(json.dumps(model))
    deepspeed = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    (beside := tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    given = Given(values={"model.seq_len": 512, "cluster.nodes": 1, "batch.micro_batch": 1, "batch.global_batch": 64})
    read = read_configs([config, beside], given)
    told = [line.partition(":")[0] for line in read.ignored if "sets no key" in line]
    assert read.mapped["batch.precision"] == "bf16"
    assert told == ["torch_dtype float16", "train_micro_batch_size_per_gpu 2"]
