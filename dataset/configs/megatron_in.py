"""Megatron-LM's settings to a job.

Sources: Megatron-LM's ``megatron/training/arguments.py`` (names, defaults and what ``validate_args`` makes of them),
``megatron/core/transformer/transformer_config.py`` and ``megatron/core/model_parallel_config.py``, core 0.8 to 0.19.
"""

from __future__ import annotations

from stepsight.dataset.configs.drafts import Draft, Settings
from stepsight.dataset.configs.megatron_model import read_model
from stepsight.dataset.configs.megatron_stages import read_stages
from stepsight.dataset.job.specs import RECOMPUTE_MODULES

# The same meaning under another name.
DIRECT = {
    "tensor_model_parallel_size": "parallel.tp",
    "context_parallel_size": "parallel.cp",
    "pipeline_model_parallel_size": "parallel.pp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.expert_tp",
    "overlap_moe_expert_parallel_comm": "parallel.overlap_ep",
    "overlap_grad_reduce": "parallel.overlap_grad_reduce",
    "overlap_param_gather": "parallel.overlap_param_gather",
    "micro_batch_size": "batch.micro_batch",
    "global_batch_size": "batch.global_batch",
    "nodes": "cluster.nodes",
    "devices_per_node": "cluster.devices_per_node",
}
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_DYNAMIC = ("tensorwise", "blockwise")
_DEFAULT = "Megatron-LM's default"


def read_megatron(settings: Settings, draft: Draft) -> None:
    """Fill a draft from Megatron-LM's settings; what no key of a job expresses is listed."""
    settings.copy(draft, DIRECT)
    draft.framework = draft.framework or _framework(settings)
    read_model(settings, draft)
    _parallel(settings, draft)
    read_stages(settings, draft)
    _batch(settings, draft)
    _recompute(settings, draft)
    _optimizer(settings, draft)
    for text in settings.left():
        draft.ignore(text)


def _framework(settings: Settings) -> str:
    if settings.find("deepspeed", "deepspeed_config"):
        return "megatron-deepspeed"
    old = ("DDP_impl", "activations_checkpoint", "async_tensor_model_parallel_allreduce")
    return "megatron-lm-2022" if settings.find(*old) and "use_mcore_models" not in settings else "megatron-core"


def _parallel(settings: Settings, draft: Draft) -> None:
    sequence = settings.flag("sequence_parallel")
    if draft.degree("tp") == 1:
        if sequence:
            draft.assume("parallel.sequence_parallel", False, "Megatron-LM turns it off without tensor parallelism")
    elif sequence is None:
        draft.assume("parallel.sequence_parallel", False, _DEFAULT)
    else:
        draft.map("parallel.sequence_parallel", sequence, settings.source("sequence_parallel"))
    expert_tp, tp = draft.get("parallel.expert_tp"), draft.degree("tp")
    if expert_tp not in (None, 1, tp):
        del draft.tables["parallel"]["expert_tp"], draft.sources["parallel.expert_tp"]
        draft.assume("parallel.expert_tp", tp, f"experts have tensor parallelism of 1 or tp, got {expert_tp}")
    _zero(settings, draft)
    if settings.flag("use_tp_pp_dp_mapping"):
        draft.map("parallel.order", "tp-cp-pp-dp", settings.source("use_tp_pp_dp_mapping"))
    kind = settings.take("cp_comm_type")
    kinds = kind if isinstance(kind, list) else [kind] if kind else []
    if kinds and draft.degree("cp") > 1:
        if set(kinds) <= {"p2p", "allgather"} and len(set(kinds)) == 1:
            way = "ring" if kinds[0] == "p2p" else "all_gather"
            draft.map("parallel.context_parallel", way, settings.source("cp_comm_type"))
        else:
            draft.assume("parallel.context_parallel", "ring", f"a job has no cp_comm_type {' '.join(kinds)}")
    _dispatcher(settings, draft)
    if settings.flag("tp_comm_overlap"):
        draft.map("parallel.overlap_tp", "split", settings.source("tp_comm_overlap"))
    elif draft.degree("tp") > 1 and settings.flag("async_tensor_model_parallel_allreduce") is not False:
        draft.assume("parallel.overlap_tp", "backward", _DEFAULT)
    if settings.flag("scatter_gather_tensors_in_pipeline") is False:
        draft.map("parallel.scatter_p2p", False, settings.source("scatter_gather_tensors_in_pipeline"))
    if settings.flag("cpu_offloading"):
        draft.map("parallel.offload_activations", True, settings.source("cpu_offloading"))


def _dispatcher(settings: Settings, draft: Draft) -> None:
    name = "moe_token_dispatcher_type"
    way, backend = settings.word(name), settings.word("moe_flex_dispatcher_backend")
    if way == "flex":
        draft.map("parallel.dispatcher", "hybridep" if backend == "hybridep" else "deepep", settings.source(name))
    elif way == "alltoall":
        draft.map("parallel.dispatcher", "alltoall", settings.source(name))
    elif way:
        draft.ignore(f"{settings.source(name)} {way}: a job has no such dispatcher")


def _zero(settings: Settings, draft: Draft) -> None:
    fsdp = settings.flag("use_megatron_fsdp") or settings.flag("use_torch_fsdp2")
    strategy = settings.word("data_parallel_sharding_strategy")
    if fsdp:
        name = "use_megatron_fsdp" if settings.flag("use_megatron_fsdp") else "use_torch_fsdp2"
        words = f"{settings.source(name)} {strategy}".strip()
        draft.map("parallel.zero_stage", SHARDING.get(strategy or "optim_grads_params", 3), words)
        settings.find("use_distributed_optimizer")
    elif settings.flag("use_distributed_optimizer"):
        draft.map("parallel.zero_stage", 1, settings.source("use_distributed_optimizer"))
    elif draft.get("parallel.zero_stage") is None:
        stage = settings.number("zero_stage")
        if stage is not None:
            draft.map("parallel.zero_stage", stage, settings.source("zero_stage"))
        else:
            draft.assume("parallel.zero_stage", 0, _DEFAULT)
    if settings.flag("torch_fsdp2_reshard_after_forward") is False:
        draft.map("parallel.reshard_after_forward", False, settings.source("torch_fsdp2_reshard_after_forward"))
    draft.assume("parallel.overlap_grad_reduce", False, _DEFAULT)
    draft.assume("parallel.overlap_param_gather", False, _DEFAULT)
    instances = settings.positive("num_distributed_optimizer_instances") or 1
    if instances > 1:
        draft.facts["replicas_of_shards"] = instances
    fp32, bf16 = settings.flag("accumulate_allreduce_grads_in_fp32"), settings.flag("grad_reduce_in_bf16")
    if bf16:
        draft.map("parallel.gradient_dtype", "model", settings.source("grad_reduce_in_bf16"))
    elif fp32:
        draft.map("parallel.gradient_dtype", "fp32", settings.source("accumulate_allreduce_grads_in_fp32"))
    elif settings.flag("fp16"):
        draft.assume("parallel.gradient_dtype", "model", _DEFAULT)
    elements = settings.positive("ddp_bucket_size")
    if elements:
        size = elements * (2 if bf16 else 4) / 2**20
        draft.map("parallel.bucket_mbytes", float(f"{size:.6g}"), settings.source("ddp_bucket_size"))


def _batch(settings: Settings, draft: Draft) -> None:
    if (name := settings.find("fp8")) and settings.take(name) not in (False, "false"):
        draft.map("batch.precision", "fp8", settings.source(name))
        settings.find("bf16", "fp16")
        recipe = settings.word("fp8_recipe")
        scaling = "dynamic" if recipe in _DYNAMIC else "mxfp8" if recipe == "mxfp8" else "delayed"
        if recipe:
            draft.map("batch.fp8_scaling", scaling, settings.source("fp8_recipe"))
        else:
            draft.assume("batch.fp8_scaling", scaling, _DEFAULT)
    elif settings.flag("bf16"):
        draft.map("batch.precision", "bf16", settings.source("bf16"))
    elif settings.flag("fp16"):
        draft.map("batch.precision", "fp16", settings.source("fp16"))
    elif draft.get("batch.precision") is None:
        draft.assume("batch.precision", "fp32", _DEFAULT)
    steps = settings.word("step_batch_size_schedule")
    if draft.get("batch.global_batch") is None and steps:
        last = steps.replace(";", " ").split()[-1].rpartition(":")[2]
        if last.isdigit():
            draft.map("batch.global_batch", int(last), settings.source("step_batch_size_schedule") + ", last step")
    if draft.get("batch.global_batch") is None and draft.get("batch.micro_batch") is not None:
        draft.facts["accumulation"] = 1


def _recompute(settings: Settings, draft: Draft) -> None:
    granularity = settings.word("recompute_granularity")
    source = settings.source("recompute_granularity")
    if settings.flag("recompute_activations"):
        granularity, source = "selective", settings.source("recompute_activations")
    if settings.find("activations_checkpoint") and not granularity:
        granularity, source = "full", settings.source("activations_checkpoint")
    if settings.word("recompute_method") and not granularity:
        granularity, source = "full", settings.source("recompute_method")
    if not granularity:
        draft.assume("parallel.recompute", "none", _DEFAULT)
        return
    method, count = settings.word("recompute_method"), settings.number("recompute_num_layers")
    if granularity == "full" and method == "block" and count == 0:
        draft.map("parallel.recompute", "none", f"{settings.source('recompute_num_layers')} 0")
        return
    draft.map("parallel.recompute", granularity, source)
    if granularity == "full" and method == "block" and count:
        per_stage = max(1, draft.get("model.layers", 1) // max(1, draft.degree("pp")))
        every = max(1, round(per_stage / count))
        reason = f"{count} layers of each stage's {per_stage} are computed again: one of {every}"
        draft.assume("parallel.recompute_every", every, reason)
    elif granularity == "full" and count and count > 1:
        draft.ignore(f"{settings.source('recompute_num_layers')} {count}: layers are computed again one by one")
    modules = settings.take("recompute_modules")
    named = [modules] if isinstance(modules, str) else modules if isinstance(modules, list) else []
    if granularity == "selective" and named:
        known = [module for module in named if module in RECOMPUTE_MODULES]
        draft.map("parallel.recompute_modules", known, settings.source("recompute_modules"))
        if len(known) < len(named):
            others = " ".join(str(module) for module in named if module not in known)
            draft.ignore(f"{settings.source('recompute_modules')} {others}: a job recomputes no such module")


def _optimizer(settings: Settings, draft: Draft) -> None:
    kind = settings.word("optimizer", "optim.name")
    if kind in ("adam", "", "fused_adam", "distributed_fused_adam", "mcore_distributed_optim", "adamw"):
        source = settings.source("optimizer", "optim.name")
        if kind:
            draft.map("optimizer.kind", "adamw", f"{source} {kind} (decoupled weight decay)")
        if kind in ("distributed_fused_adam", "mcore_distributed_optim") and draft.get("parallel.zero_stage", 0) < 1:
            draft.map("parallel.zero_stage", 1, f"{source} {kind}")
    else:
        draft.assume("optimizer.kind", "adamw", f"a job has no optimizer {kind}")
    clip = settings.number("clip_grad", "gradient_clip_val", whole=False)
    if clip is not None:
        source = settings.source("clip_grad", "gradient_clip_val")
        draft.map("optimizer.clip_grad_norm", clip > 0, f"{source} {clip:g}")
    else:
        draft.assume("optimizer.clip_grad_norm", True, _DEFAULT)
    if settings.flag("optimizer_cpu_offload") or settings.flag("cpu_optimizer"):
        draft.map("optimizer.offload", True, settings.source("optimizer_cpu_offload", "cpu_optimizer"))
