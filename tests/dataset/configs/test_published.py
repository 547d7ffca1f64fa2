"""Configurations in the form in which frameworks publish them, against facts known from papers and model cards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.formats import ConfigJob, read_configs
from stepsight.dataset.job.job import ModelSpec

GPT3 = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-1}
MODEL=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536   # sequences
    --fp16 --clip-grad 1.0 --lr 6.0e-5
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py ${MODEL[@]} ${TRAINING[@]} \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file $1
"""
MIXTRAL = """MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 4096
  --ffn-hidden-size: 14336
  --num-attention-heads: 32
  --group-query-attention: true
  --num-query-groups: 8
  --swiglu: true
  --normalization: RMSNorm
  --position-embedding-type: rope
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --num-experts: 8
  --moe-router-topk: 2
  --tokenizer-type: Llama2Tokenizer
  --seq-length: 4096
  --pipeline-model-parallel-size: 4
  --num-layers-per-virtual-pipeline-stage: 1
  --expert-model-parallel-size: 8
  --use-distributed-optimizer: true
  --micro-batch-size: 1
  --global-batch-size: 256
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --bf16: true
"""
BRIDGE = """model: {num_layers: 80, hidden_size: 8192, ffn_hidden_size: 28672, num_attention_heads: 64,
  num_query_groups: 8, share_embeddings_and_output_weights: false, seq_length: 8192, vocab_size: 128256,
  gated_linear_unit: true, normalization: RMSNorm, position_embedding_type: rope,
  add_bias_linear: false, cpu_offloading: true, cpu_offloading_num_layers: 40, fp8: null, hidden_dropout: 0.0}
ddp: {use_megatron_fsdp: true, data_parallel_sharding_strategy: optim_grads_params, bucket_size: 40000000}
mixed_precision: {bf16: true, fp8: hybrid, fp8_recipe: tensorwise, fp8_param_gather: true, grad_reduce_in_fp32: false}
optimizer: {optimizer: adam, lr: 0.0003, clip_grad: 1.0}
train: {micro_batch_size: 2, global_batch_size: 256, train_iters: 50}
"""
DEEPSEEK = """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
--v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --vocab-size 129280
--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 4096
--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "Et*4|(t*4|)*14tL" --bf16 --fp8-format e4m3
--fp8-recipe blockwise --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--micro-batch-size 1 --global-batch-size 64 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
"""
TITAN = """# NOTE: this toml config is a preset for 128 H100 GPUs.
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
"""
TITAN_2024 = """[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 8
seq_len = 8192
data_parallel_shard_degree = 4
tensor_parallel_degree = 8
compile = false
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_split_points = ["layers.38"]
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
NANOTRON = """model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 4096, intermediate_size: 11008, num_attention_heads: 32,
    num_hidden_layers: 32, num_key_value_heads: 32, vocab_size: 32000, tie_word_embeddings: false}
optimizer: {zero_stage: 1, clip_grad: 1.0, accumulate_grad_in_fp32: true}
parallelism: {dp: 4, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 4096}
"""
MAXTEXT = """base_emb_dim: 8192
base_num_query_heads: 64
base_num_kv_heads: 8
base_mlp_dim: 28672
base_num_decoder_layers: 80
head_dim: 128
mlp_activations: ["silu","linear"]
vocab_size: 128256
logits_via_embedding: false
decoder_block: "llama2"
per_device_batch_size: 4
max_target_length: 8192
remat_policy: "full"
ici_fsdp_parallelism: 8
dcn_data_parallelism: 2
"""
NEMO = """name: megatron_gpt
trainer: {devices: 8, num_nodes: 4, precision: bf16, gradient_clip_val: 1.0}
model:
  micro_batch_size: 4
  global_batch_size: 256
  tensor_model_parallel_size: 2
  encoder_seq_length: 2048
  num_layers: 24
  hidden_size: 1024
  ffn_hidden_size: 4096
  num_attention_heads: 16
  max_position_embeddings: ${.encoder_seq_length}
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 6
  use_flash_attention: true
  tokenizer: {library: megatron, type: GPT2BPETokenizer}
  optim: {name: distributed_fused_adam, lr: 2e-4}
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
ZERO3 = {
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "train_batch_size": "auto",
}  # fmt: skip


def read(folder: Path, files: Mapping[str, Any], given: Given | None = None) -> ConfigJob:
    paths = []
    for name, content in files.items():
        paths.append(folder / name)
        paths[-1].write_text(content if isinstance(content, str) else json.dumps(content))
    return read_configs(paths, given)


def num_parameters(model: ModelSpec) -> float:
    """Parameters in billions, in closed form, norms and biases left out."""
    m, hidden = model, model.hidden
    if m.attention == "mla":
        inner = m.heads * (m.head_size + m.rope_head_dim)
        query = m.q_lora_rank * (hidden + inner) if m.q_lora_rank else hidden * inner
        keys = hidden * (m.kv_lora_rank + m.rope_head_dim) + m.kv_lora_rank * m.heads * (m.head_size + m.v_head_dim)
        attention = query + keys + m.heads * m.v_head_dim * hidden
    else:
        attention = 2 * hidden * m.head_size * (m.heads + m.kv_heads)
    products = 3 if m.gated_mlp else 2
    with_experts = 0 if not m.experts else (m.layers - m.dense_layers) // m.moe_every
    experts = (m.experts + m.shared_experts) * products * hidden * m.expert_ffn + hidden * m.experts
    mlps = (m.layers - with_experts) * products * hidden * m.ffn + with_experts * experts
    tables = m.vocab * hidden * (1 if m.tied_embeddings else 2)
    return (m.layers * attention + mlps + tables) / 1e9


@pytest.mark.parametrize(
    ("name", "content", "billions"),
    [
        ("train.sh", GPT3, 174.6),
        ("mixtral.yaml", MIXTRAL, 46.7),
        ("deepseek.txt", DEEPSEEK, 671.0),
        ("bridge.yaml", BRIDGE, 70.55),
        ("llama3_405b.toml", TITAN, 405.8),
        ("llama3_70b.toml", TITAN_2024, 70.6),
        ("nanotron.yaml", NANOTRON, 6.74),
        ("maxtext.yml", MAXTEXT, 70.6),
        ("config.json", LLAMA, 8.03),
    ],
)
def test_models_have_their_published_size(tmp_path: Path, name: str, content: Any, billions: float) -> None:
    found = read(tmp_path, {name: content})
    assert num_parameters(found.job.model) == pytest.approx(billions, rel=3e-3)


def test_megatron_script(tmp_path: Path) -> None:
    found = read(tmp_path, {"train.sh": GPT3})
    job = found.job
    assert (job.parallel.tp, job.parallel.pp, job.batch.global_batch, job.batch.precision) == (8, 16, 1536, "fp16")
    assert (job.cluster.nodes, job.model.vocab, job.framework) == (16, 51200, "megatron-core")
    assert "cluster.nodes" in found.assumed and found.mapped["model.layers"] == 96
    assert any(text.startswith("--lr 6.0e-5") for text in found.ignored)


def test_what_the_user_gives_wins(tmp_path: Path) -> None:
    values = {"cluster.hardware": "a100-sxm-80gb", "cluster.nodes": 128}
    found = read(tmp_path, {"train.sh": GPT3}, Given(values=values, variables={"SLURM_NNODES": "64"}))
    assert (found.job.cluster.nodes, found.job.parallel.dp, found.job.hardware_name) == (128, 8, "a100-sxm-80gb")
    assert read(tmp_path, {"train.sh": GPT3}, Given(variables={"SLURM_NNODES": "64"})).job.parallel.dp == 4


def test_megatron_arguments_in_yaml(tmp_path: Path) -> None:
    job = read(tmp_path, {"model_config.yaml": MIXTRAL}).job
    p, m = job.parallel, job.model
    assert (p.pp, p.virtual_stages, p.ep, p.dp, p.zero_stage) == (4, 8, 8, 8, 1)
    assert (m.family, m.kv_heads, m.experts, m.experts_per_token, m.dropout) == ("llama", 8, 8, 2, 0.0)


def test_megatron_bridge(tmp_path: Path) -> None:
    found = read(tmp_path, {"run.yaml": BRIDGE})
    p, batch = found.job.parallel, found.job.batch
    assert (found.formats, found.job.framework, found.job.model.family) == (("megatron-bridge",), "nemo", "llama")
    assert (p.zero_stage, p.offload_activations, p.offload_layers) == (3, True, 40)
    assert (batch.precision, batch.fp8_parameters, batch.micro_batch) == ("fp8", True, 2)


def test_megatron_layout_latent_attention_and_dense_layers(tmp_path: Path) -> None:
    job = read(tmp_path, {"deepseek.txt": DEEPSEEK}).job
    p, m = job.parallel, job.model
    assert p.stage_layers == (*(4,) * 15, 1) and p.virtual_stages == 2
    assert (m.attention, m.head_dim, m.dense_layers, m.shared_experts) == ("mla", 128, 3, 1)
    assert (p.expert_tp, p.ep, p.recompute, job.batch.precision, job.batch.fp8_scaling) == (
        1,
        64,
        "full",
        "fp8",
        "current",
    )


def test_torchtitan_of_2025(tmp_path: Path) -> None:
    job = read(tmp_path, {"llama3_405b.toml": TITAN}).job
    p = job.parallel
    assert (p.tp, p.dp, p.zero_stage, p.overlap_tp, p.recompute) == (8, 16, 3, "torch-async", "full")
    assert (job.batch.micro_batch, job.batch.global_batch, job.batch.precision) == (2, 32, "fp8")
    assert (job.cluster.num_devices, job.hardware_name, job.model.eager_kernels) == (128, "h100-sxm-80gb", False)


@pytest.mark.parametrize(("text", "narrow"), [("", False), ("enable_fsdp_float8_all_gather = true\n", True)])
def test_torchtitan_gathers_in_8_bits_where_a_file_says_so(tmp_path: Path, text: str, narrow: bool) -> None:
    batch = read(tmp_path, {"llama3_405b.toml": f"{TITAN}[float8]\n{text}"}).job.batch
    assert (batch.fp8_scaling, batch.fp8_parameters) == ("dynamic", narrow)


def test_torchtitan_of_2024(tmp_path: Path) -> None:
    job = read(tmp_path, {"llama3_70b.toml": TITAN_2024}).job
    p = job.parallel
    assert (p.tp, p.pp, p.dp, p.stage_layers) == (8, 2, 4, (38, 42))
    assert (p.recompute, p.recompute_every, p.reshard_after_forward) == ("full", 2, False)
    assert job.model.eager_kernels


def test_torchtitan_registry(tmp_path: Path) -> None:
    registry = """
import os
os.system("touch /tmp/must-not-exist")
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )
def llama3_8b_float8() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism.data_parallel_shard_degree = 16
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config()])
    return config
"""
    code = """
def _8b(attn_backend):
    dim = 4096
    return Llama3Model.Config(dim=dim, vocab_size=128256, layers=_build(
        n_layers=32, dim=dim, n_heads=32, n_kv_heads=8,
        hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=1024, ffn_dim_multiplier=1.3)))
configs = {"8B": _8b}
"""
    (tmp_path / "__init__.py").write_text(code)
    lora = registry.replace("Float8LinearConverter", "LoRAConverter")
    with pytest.raises(ValueError, match=r"adapters of torchtitan are not read; .*got model\.converters lora"):
        read(tmp_path, {"config_registry.py": lora}, Given(pick="llama3_8b_float8"))
    job = read(tmp_path, {"config_registry.py": registry}, Given(pick="llama3_8b_float8")).job
    assert num_parameters(job.model) == pytest.approx(8.03, rel=3e-3)
    assert (job.batch.micro_batch, job.batch.precision, job.parallel.dp, job.parallel.recompute) == (
        2,
        "fp8",
        16,
        "full",
    )


def test_hugging_face_with_deepspeed(tmp_path: Path) -> None:
    found = read(tmp_path, {"config.json": LLAMA, "ds.json": ZERO3}, Given(values={"cluster.nodes": 2}))
    job = found.job
    assert (job.parallel.zero_stage, job.parallel.dp, job.optimizer.offload) == (3, 16, True)
    assert (job.batch.micro_batch, job.batch.global_batch, job.batch.precision) == (2, 128, "bf16")
    assert found.assumed["model.seq_len"] == 8192 and found.formats == ("huggingface", "deepspeed")


def test_hugging_face_with_accelerate(tmp_path: Path) -> None:
    accelerate = """distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_activation_checkpointing: true}
"""
    p = read(tmp_path, {"config.json": LLAMA, "accelerate.yaml": accelerate}).job.parallel
    assert (p.dp, p.dp_shard, p.zero_stage, p.recompute) == (16, 8, 3, "full")


def test_a_strategy_alone_is_mapped_but_is_no_job(tmp_path: Path) -> None:
    found = read(tmp_path, {"ds.json": ZERO3})
    assert found.mapped["parallel.zero_stage"] == 3 and "model.layers" in found.missing
    with pytest.raises(ValueError, match=r"no configuration states model\.family"):
        _ = found.job


def test_nanotron(tmp_path: Path) -> None:
    job = read(tmp_path, {"config.yaml": NANOTRON}).job
    p = job.parallel
    assert (p.dp, p.pp, p.tp, p.sequence_parallel, p.overlap_tp, p.zero_stage) == (4, 2, 2, True, "backward", 1)
    assert (job.batch.global_batch, p.gradient_dtype, job.cluster.num_devices) == (64, "fp32", 16)


def test_maxtext(tmp_path: Path) -> None:
    job = read(tmp_path, {"run.yml": MAXTEXT}).job
    p = job.parallel
    assert (p.dp, p.dp_shard, p.zero_stage, p.recompute, job.model.kv_heads) == (16, 8, 3, "full", 8)
    assert (job.batch.micro_batch, job.batch.global_batch) == (4, 64)


def test_maxtext_reads_the_model_that_a_run_names(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama3-70b.yml").write_text(MAXTEXT)
    run = 'base_config: "base.yml"\nmodel_name: "llama3-70b"\nper_device_batch_size: 2\n'
    job = read(tmp_path, {"run.yml": run}).job
    assert (job.model.layers, job.batch.micro_batch) == (80, 2)


def test_nemo(tmp_path: Path) -> None:
    job = read(tmp_path, {"megatron_gpt_config.yaml": NEMO}).job
    p = job.parallel
    assert (p.tp, p.dp, p.zero_stage, p.recompute, p.recompute_every) == (2, 16, 1, "full", 4)
    assert (job.model.layers, job.model.seq_len, job.framework) == (24, 2048, "nemo")


LORA_OF_NEMO = """\
  peft:
    peft_scheme: {scheme}
    lora_tuning: {{adapter_dim: 16, adapter_dropout: 0.1, target_modules: [attention_qkv, attention_dense]}}
"""


@pytest.mark.parametrize(("scheme", "rank"), [("lora", 16), ("null", 0), ("none", 0)])
def test_nemo_states_adapters(scheme: str, rank: int, tmp_path: Path) -> None:
    """The table of LoRA counts where it is the scheme."""
    found = read(tmp_path, {"megatron_gpt_config.yaml": NEMO + LORA_OF_NEMO.format(scheme=scheme)})
    model = found.job.model
    assert (model.lora_rank, model.lora_dropout) == (rank, 0.1 if rank else 0.0)
    assert model.lora_targets == (("qkv", "proj") if rank else ())
    assert any("adapter_dim" in text for text in found.ignored) == (rank == 0)


def test_megatron_bridge_states_adapters(tmp_path: Path) -> None:
    peft = (
        "peft: {dim: 32, alpha: 32, dropout: 0.0, target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}\n"
    )
    found = read(tmp_path, {"run.yaml": BRIDGE + peft})
    assert found.job.model.lora_targets == ("qkv", "proj", "fc1", "fc2")
    assert found.job.model.lora_rank == 32 and any("peft.alpha" in text for text in found.ignored)


_PEFT = "peft: {dim: 16, target_modules: [linear_qkv], "


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("n.yaml", NEMO + LORA_OF_NEMO.format(scheme="qlora"), "model.peft.peft_scheme qlora"),
        ("n.yaml", NEMO + LORA_OF_NEMO.format(scheme="ptuning"), "model.peft.peft_scheme ptuning"),
        ("n.yaml", NEMO + LORA_OF_NEMO.format(scheme="lora,adapter"), "model.peft.peft_scheme lora,adapter"),
        (
            "n.yaml",
            NEMO + LORA_OF_NEMO.format(scheme="lora").replace("{", "{variant: canonical, "),
            "variant canonical",
        ),
        ("n.yaml", NEMO + LORA_OF_NEMO.format(scheme="lora").replace("{", "{layer_selection: [1], "), "selection 1"),
        ("n.yaml", NEMO + LORA_OF_NEMO.format(scheme="lora").replace("{", "{weight_tying: true, "), "tying true"),
        ("b.yaml", BRIDGE + _PEFT + "_target_: megatron.bridge.peft.dora.DoRA}", "peft._target_ megatron.*DoRA"),
        ("b.yaml", BRIDGE + _PEFT + "_target_: megatron.bridge.peft.canonical_lora.CanonicalLoRA}", "CanonicalLoRA"),
        ("b.yaml", BRIDGE + _PEFT + "exclude_modules: ['*.0.*']}", "peft.exclude_modules"),
        (
            "t.toml",
            TITAN.replace('"float8"', '"float8", "lora"') + "[lora]\nrank = 8\n",
            r"model\.converters float8 lora",
        ),
    ],
)
def test_adapters_of_other_kinds_are_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    """What is trained decides memory and time: it is not left out."""
    with pytest.raises(ValueError, match=f"state model.lora_rank, .*got .*{words}") as caught:
        read(tmp_path, {name: text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "targets"),
    [
        ("n.yaml", NEMO + "  peft: {peft_scheme: lora}\n", ["qkv"]),
        ("b.yaml", BRIDGE + "peft: {_target_: megatron.bridge.peft.lora.LoRA}\n", ["qkv", "proj", "fc1", "fc2"]),
        ("b.yaml", BRIDGE + "peft: {target_modules: [linear_qkv]}\n", ["qkv"]),
        ("b.yaml", BRIDGE + "peft: {dim: 32}\n", ["qkv", "proj", "fc1", "fc2"]),
    ],
)
def test_settings_of_adapters_have_the_frameworks_defaults(
    name: str, text: str, targets: list[str], tmp_path: Path
) -> None:
    found = read(tmp_path, {name: text})
    model = found.job.model
    assert (model.lora_rank, list(model.lora_targets), model.lora_dropout) == (32, targets, 0.0)
    assert {"model.lora_rank", "model.lora_targets"} - {*found.mapped} <= {*found.assumed}
    assert read(tmp_path, {"none.yaml": BRIDGE + "peft: null\n"}).job.model.lora_rank == 0


_OF_PEFT = {"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "o_proj", "down_proj"], "lora_dropout": 0.05,
            "bias": "none", "lora_alpha": 32, "modules_to_save": None, "rank_pattern": {},
            "exclude_modules": []}  # fmt: skip


def test_peft_states_adapters(tmp_path: Path) -> None:
    found = read(tmp_path, {"config.json": LLAMA, "adapter_config.json": _OF_PEFT})
    model = found.job.model
    assert (model.lora_rank, model.lora_targets, model.lora_dropout) == (16, ("q", "proj", "fc2"), 0.05)
    assert any("lora_alpha" in text for text in found.ignored)
    found = read(tmp_path, {"config.json": LLAMA, "adapter_config.json": {"peft_type": "LORA"}})
    assert (found.assumed["model.lora_rank"], found.job.model.lora_targets) == (8, ("q", "v"))


@pytest.mark.parametrize(
    "wrong", [{"peft_type": "IA3"}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"},
              {"rank_pattern": {"q_proj": 4}}, {"layers_to_transform": [1]}]
)  # fmt: skip
def test_other_adapters_of_peft_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"state model.lora_rank, .*got {next(iter(wrong))}"):
        read(tmp_path, {"config.json": LLAMA, "adapter_config.json": {**_OF_PEFT, **wrong}})


_SYNC = "overlap_grad_sync: true, overlap_param_sync: true, bucket_cap_mb: 75, ddp_bucket_size: null"


@pytest.mark.parametrize(("name", "mbytes"), [("distributed_fused_adam", 75.0), ("mcore_distributed_optim", None)])
def test_a_nemo_optimizer_states_how_gradients_are_sent(name: str, mbytes: float | None, tmp_path: Path) -> None:
    """Megatron-Core's buckets have a number of elements: NeMo does not give it ``bucket_cap_mb``."""
    found = read(tmp_path, {"n.yaml": NEMO.replace("distributed_fused_adam", f"{name}, {_SYNC}")})
    assert found.mapped["parallel.overlap_grad_reduce"] and found.mapped["parallel.overlap_param_gather"]
    assert found.mapped.get("parallel.bucket_mbytes") == mbytes
    assert [text for text in found.ignored if re.search("(_sync|bucket).* (?!null)", text)] == (
        [] if mbytes else ["model.optim.bucket_cap_mb 75"]
    )


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("n.yaml", NEMO, {"batch.precision": "trainer.precision bf16"}),
        ("n.yaml", NEMO.replace("n: bf16", "n: 32-true"), {"batch.precision": "trainer.precision 32-true"}),
        (
            "n.yaml",
            NEMO.replace("model:\n", "model:\n  fp8: true\n  fp8_hybrid: true\n"),
            {"batch.precision": "model.fp8 true; trainer.precision bf16; model.fp8_hybrid true"},
        ),
        ("n.sh", "#SBATCH --gres=gpu:4\ntrain --num-layers 2\n", {"cluster.devices_per_node": "#SBATCH --gres gpu:4"}),
    ],
)
def test_words_of_a_value_are_those_of_the_file(file: str, text: str, words: dict[str, str], tmp_path: Path) -> None:
    """Not those by which Megatron's reader knows the same setting."""
    found = read(tmp_path, {file: text})
    assert found.sources.items() >= words.items()
    assert not any("precision" in text or "fp8" in text for text in found.ignored)
