"""Megatron-LM's arguments; ``megatron_words`` finds them in scripts, YAML files and NeMo's configurations.

Sources: Megatron-LM's ``megatron/training/arguments.py`` (names, defaults and what ``validate_args`` makes of them),
``megatron/core/transformer/transformer_config.py`` and ``megatron/core/model_parallel_config.py``, core 0.8 to 0.19.
"""

from __future__ import annotations

import re
import shlex

from stepsight.dataset.configs import key_table
from stepsight.dataset.configs.documents import facts
from stepsight.dataset.configs.drafts import WHOLE, Reading
from stepsight.dataset.job.job import Job
from stepsight.dataset.job.specs import RECOMPUTE_MODULES

_PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "vit": "pretrain_vision_classify.py"}
_OF_2022 = ("DDP_impl", "activations_checkpoint", "async_tensor_model_parallel_allreduce")


def read_megatron(
    reading: Reading, first: tuple[key_table.Row, ...] = (), last: tuple[key_table.Row, ...] = ()
) -> None:
    """Fill a draft from Megatron-LM's settings; what no key of a job expresses is listed.

    Rows of a file's own stand ``first`` and ``last``.
    """
    key_table.read_rows((key_table.Row("framework", read=_read_framework), *first, *ROWS, *last), reading)


def _read_framework(reading: Reading) -> None:
    if reading.draft.framework:
        return
    reading.draft.framework = "megatron-core"
    if found := reading.find("deepspeed", "deepspeed_config"):
        reading.draft.choose("megatron-deepspeed", reading.source(found))
    elif (found := reading.find(*_OF_2022)) and "use_mcore_models" not in reading:
        reading.draft.choose("megatron-lm-2022", reading.source(found))


def write_megatron(job: Job, *, script: bool = False) -> key_table.ConfigText:
    """Write a job as arguments, one to a line, or as a shell script that launches them with torchrun."""
    view = key_table.JobView(job)
    view.write(ROWS)
    lines = []
    for name, value in view.settings.items():
        if value is not None and value is not False:
            words = [] if value is True else value if isinstance(value, list) else [value]
            lines.append(" ".join([f"--{name.replace('_', '-')}", *(shlex.quote(str(word)) for word in words)]))
    program = _PROGRAMS.get(job.model.family, "pretrain_gpt.py")
    note = f"they are for {program}; give the tokenizer and the data: --tokenizer-type, --data-path"
    if not script:
        return view.text("\n".join(lines) + "\n", ".txt", note)
    launch = f"torchrun --nproc-per-node {job.cluster.devices_per_node} --nnodes {job.cluster.nodes}"
    body = "\n".join(f"    {line}" for line in lines)
    if job.cluster.nodes > 1:  # the environment of each node says where they meet, and its number
        launch += ' --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"'
    more = '    "$@"  # --tokenizer-type, --data-path ...'
    text = f"#!/bin/bash\n# {shlex.quote(job.name)}\nARGS=(\n{body}\n{more}\n)\n{launch} {program} " + '"${ARGS[@]}"\n'
    return view.text(text, ".sh", note)


def _read_expert_tp(reading: Reading) -> None:
    tp, expert_tp = reading.degree("tp"), reading.get("parallel.expert_tp")
    if expert_tp not in (None, 1, tp):
        reading.draft.drop("parallel.expert_tp")
        reading.assume("parallel.expert_tp", tp, f"experts have tensor parallelism of 1 or tp, got {expert_tp}")


def _write_shards(view: key_table.JobView) -> None:
    shards, dp = view["parallel.dp_shard"], view.job.parallel.dp
    if shards and shards < dp:
        view.put(num_distributed_optimizer_instances=dp // shards)


def _write_gradients(view: key_table.JobView) -> None:
    kind, precision = view["parallel.gradient_dtype"], view.job.batch.precision
    narrow = precision in ("bf16", "fp8")
    view.put(accumulate_allreduce_grads_in_fp32=kind == "fp32", grad_reduce_in_bf16=kind == "model" and narrow)
    wide = kind == "model" and not narrow and precision != "fp16"
    view.refuse("parallel.gradient_dtype", precision != "fp32" and (kind == "fp32-cast" or wide))


def _read_stages(reading: Reading) -> None:
    """Virtual stages, and the layers of each stage if they are uneven."""
    layers, pp, layout = reading.get("model.layers"), reading.degree("pp"), reading.word(_LAYOUT)
    if layout and layers:
        counts = [
            stage.count("t") for stage in key_table.repeated(re.sub(r"[\s,]", "", layout)).split("|")
        ]  # Et|(tt|)*29|mL
        if not counts or len(counts) % pp or sum(counts) != layers:
            words = f"{len(counts)} stages of {sum(counts)} layers for pp {pp} and {layers} layers"
            reading.ignore(f"{reading.source(_LAYOUT)} {layout}: {words}")
            return
        if len(counts) // pp > 1:
            reading.map("parallel.virtual_stages", len(counts) // pp, _LAYOUT)
        reading.map("parallel.stage_layers", counts, _LAYOUT)
        return
    chunks = reading.positive("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    if chunks is None and layers and (each := reading.positive("num_layers_per_virtual_pipeline_stage")):
        chunks = max(1, layers // pp // each)
    if chunks and chunks > 1:
        reading.map("parallel.virtual_stages", chunks)
    if layers and pp > 1 and pp * (chunks or 1) <= key_table.MOST_STAGES:
        _read_uneven_stages(reading, layers, pp, chunks or 1)


_LAYOUT = "pipeline_model_parallel_layout"
_TABLES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pp_partition_method")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _read_uneven_stages(reading: Reading, layers: int, pp: int, chunks: int) -> None:
    first, last = (reading.positive(name) or 0 for name in _ENDS)
    parted = "embedding" in reading.word(_TABLES[2])  # DeepSpeed counts both tables as layers
    embedding, loss = (reading.flag(name) or parted for name in _TABLES[:2])
    names: tuple[str, ...]
    if embedding or loss:
        names, rest = _TABLES, (layers + embedding + loss) % (pp * chunks)
        counts = key_table.even_stages(pp * chunks, layers, embedding, loss)
    elif first or last:
        # Counts are those of a rank, so that each of its virtual stages has an equal part.
        names, (even, rest) = _ENDS, divmod(layers - first - last, max(1, pp - bool(first) - bool(last)))
        ranks = [first or even, *[even] * (pp - 2), last or even]
        rest += sum(count % chunks for count in ranks)
        counts = [count // chunks for count in ranks] * chunks
    else:
        return
    if rest or sum(counts) != layers or min(counts) < 0:
        reading.ignore(f"{reading.source(*names)}: {layers} layers cannot be shared so by {pp * chunks} stages")
    else:
        reading.map("parallel.stage_layers", counts, *names)


def _write_stages(view: key_table.JobView) -> None:
    chunks, layers = view["parallel.virtual_stages"], view.stage_layers()
    uneven, t5 = len(set(layers)) > 1, view.job.model.family == "t5"
    view.refuse("parallel.schedule", view["parallel.schedule"] != "1f1b")
    view.refuse("parallel.stage_layers", uneven and t5)
    if uneven and not t5:
        stages = ["t" * count for count in layers]
        view.put(pipeline_model_parallel_layout="|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"]))
    else:
        view.put(num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None)


def _read_precision(reading: Reading) -> None:
    half = next((name for name in ("bf16", "fp16") if reading.flag(name)), "")
    if "fp4" in reading and reading.take("fp4") not in (False, "false"):
        reading.map("batch.precision", "nvfp4", "fp4")
    elif "fp8" in reading and reading.take("fp8") not in (False, "false"):
        reading.map("batch.precision", "fp8", "fp8")
        for name in ("fp8_hybrid", "fp8_e4m3"):  # of NeMo, which format: a job has one fp8
            reading.find(name)
        known = {"tensorwise": "current", "blockwise": "current", "mxfp8": "mxfp8"}
        reading.map("batch.fp8_scaling", known.get(reading.word("fp8_recipe"), "delayed"), "fp8_recipe")
    elif half:
        reading.map("batch.precision", half, half)
    else:
        reading.assume("batch.precision", "fp32")


def _read_batch(reading: Reading) -> None:
    steps = reading.word("step_batch_size_schedule").replace(";", " ").split()
    if reading.get("batch.global_batch") is None:
        size = steps[-1].rpartition(":")[2] if steps else ""
        if WHOLE(size):
            reading.map("batch.global_batch", int(size))
        elif reading.get("batch.micro_batch") is not None:
            reading.assume("run.accumulation", 1)


def _read_recompute(reading: Reading) -> None:
    granularity, method = reading.word("recompute_granularity"), reading.word("recompute_method")
    if reading.flag("recompute_activations"):
        granularity = "selective"
    elif not granularity and (reading.find("activations_checkpoint") or method):
        granularity = "full"
    if not granularity:
        reading.assume("parallel.recompute", "none")
        return
    count, source = reading.number("recompute_num_layers"), reading.source("recompute_num_layers")
    none = granularity == "full" and method == "block" and count == 0
    reading.map("parallel.recompute", "none" if none else granularity)
    if granularity == "full" and method == "block" and count:
        layers = reading.get("model.layers", 1) + reading.get("model.encoder_layers", 0)
        per_stage = max(1, layers // max(1, reading.degree("pp")))
        every = max(1, round(per_stage / count))
        reason = f"{count} layers of each stage's {per_stage} are computed again: one of {every}"
        reading.assume("parallel.recompute_every", every, reason)
    elif granularity == "full" and count and count > 1:
        reading.ignore(f"{source} {count}: layers are computed again one by one")
    modules = reading.take("recompute_modules") if granularity == "selective" else None
    if named := [modules] if isinstance(modules, str) else modules if isinstance(modules, list) else []:
        known = [module for module in named if module in RECOMPUTE_MODULES]
        reading.map("parallel.recompute_modules", known, "recompute_modules")
        if len(known) < len(named):
            others = " ".join(str(module) for module in named if module not in known)
            reading.ignore(f"{reading.source('recompute_modules')} {others}: a job recomputes no such module")


def _write_recompute(view: key_table.JobView) -> None:
    kind, every = view["parallel.recompute"], view["parallel.recompute_every"]
    view.put(recompute_granularity=kind if kind != "none" else None)
    if kind == "selective" and view["parallel.recompute_modules"]:
        view.put(recompute_modules=" ".join(view["parallel.recompute_modules"]))
    elif kind == "full":
        per_stage = view.job.model.total_layers // view.job.parallel.pp
        view.put(recompute_method="uniform" if every == 1 else "block")
        view.put(recompute_num_layers=1 if every == 1 else max(1, per_stage // every))
        view.refuse("parallel.recompute_every", every > 1 and per_stage % every)


def _write_offload(view: key_table.JobView) -> None:
    layers, most = view["parallel.offload_layers"], view.job.model.total_layers - 1  # that Megatron-LM takes
    if view["parallel.offload_activations"] and view.job.parallel.pp == 1 and most:
        view.put(cpu_offloading=True, cpu_offloading_num_layers=min(layers or most, most))
        view.refuse("parallel.offload_layers", not 0 < layers <= most)
    else:
        view.refuse("parallel.offload_activations", view.job.parallel.offload_activations)
        view.refuse("parallel.offload_layers", layers)


def _write_image(view: key_table.JobView) -> None:
    patch, image = view.image()
    view.put(patch_dim=patch, img_h=image, img_w=image)


def _write_positions(view: key_table.JobView) -> None:
    view.put(max_position_embeddings=max(view["model.seq_len"], view["model.encoder_seq_len"]))


def _read_family(reading: Reading) -> None:
    norm, bias = reading.word("normalization").lower(), reading.flag("add_bias_linear", "bias")
    rotary = reading.flag("use_rotary_position_embeddings")
    position = "rope" if rotary else reading.word("position_embedding_type")
    if reading.get("model.family") is not None:
        return
    like_llama = norm == "rmsnorm" or (position == "rope" and bias is False)
    family = "llama" if like_llama else "gpt"
    reading.map("model.family", family)
    if len({norm == "rmsnorm", position == "rope", bias is False}) > 1:
        wanted = "RMSNorm, rotary positions, no biases" if like_llama else "LayerNorm, learned positions, biases"
        stated = (
            f"{norm or 'layernorm'}, positions {position or 'learned_absolute'}, bias {str(bias is not False).lower()}"
        )
        reading.ignore(f"{stated}: the family stands for {wanted}")


def _read_ffn(reading: Reading) -> None:
    hidden = reading.get("model.hidden")
    if reading.copy("model.ffn", "ffn_hidden_size") is None and hidden:
        if reading.get("model.gated_mlp"):
            reading.assume("model.ffn", int(4 * hidden * 2 / 3 / 64) * 64, f"{reading.default} with --swiglu")
        reading.assume("model.ffn", 4 * hidden)


def _read_length(reading: Reading) -> None:
    names = ["seq_length", "encoder_seq_length"]
    if "decoder_seq_length" in reading:  # of a model of images and text
        words = f"{reading.source(*names)} {reading.number(*names)}"
        reading.ignore(f"the encoder of images, with {words}: the job is the model of text alone")
        names = ["decoder_seq_length"]
    length = reading.number(*names)
    if length is not None and reading.get("model.seq_len") is None:
        reading.map("model.seq_len", length, *names)


def _read_image(reading: Reading) -> None:
    height, width = reading.positive("img_h") or 224, reading.positive("img_w") or 224
    patch, channels = reading.positive("patch_dim") or 16, reading.positive("num_channels") or 3
    reading.map("model.patch_dim", patch * patch * channels, "patch_dim")
    reading.assume("model.seq_len", (height // patch) * (width // patch) + 1, "patches and the class token")
    reading.map("model.vocab", reading.positive("num_classes") or 1000, "num_classes")


def _write_heads(view: key_table.JobView) -> None:
    if view["model.kv_heads"] != view["model.heads"] and view.job.model.attention != "mla":
        view.put(group_query_attention=True, num_query_groups=view["model.kv_heads"])


def _read_experts(reading: Reading) -> None:
    if reading.get("model.experts", 0) <= 1:
        reading.draft.drop("model.experts")


def _write_expert_layers(view: key_table.JobView) -> None:
    dense, every, layers = view["model.dense_layers"], view["model.moe_every"], view["model.layers"]
    if dense and every == 1:
        view.put(moe_layer_freq=f"([0]*{dense}+[1]*{layers - dense})")
    elif every > 1:
        view.put(moe_layer_freq=every)
        view.refuse("model.dense_layers", dense)


def _read_vocabulary(reading: Reading) -> None:
    names = ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file", "run_name")
    text = " ".join([reading.word(name) for name in names]).lower().replace("_", "-")
    known = ((one["tokens"], word) for one in facts()["megatron"]["vocabularies"] for word in one["words"])
    found = next((pair for pair in known if re.search(re.escape(pair[1]) + r"(?!\d)", text)), None)
    value, reason = 32000, "give it, the tokenizer is not known"
    if reading.get("model.family") in ("bert", "t5") and "wordpiece" not in text:
        value, reason = 30522, "BERT's lower-case WordPiece"
    elif found:
        value, reason = found[0], f"tokens of the tokenizer {found[1]}"
    elif reading.word("tokenizer_type") in ("", "GPT2BPETokenizer"):
        value, reason = 50257, "GPT-2's tokens"
    reading.assume("model.vocab", value, f"no vocab_size is stated: {reason}")


def _read_dropout(reading: Reading) -> None:
    after, scores = (reading.number(f"{name}_dropout", whole=False) for name in ("hidden", "attention"))
    values = [0.1 if value is None else value for value in (after, scores)]
    if after is None and scores is None:
        reading.assume("model.dropout", 0.1)
    else:
        reading.map("model.dropout", max(values), "hidden_dropout", "attention_dropout")
    if values[0] != values[1]:
        words = f"hidden_dropout {values[0]:g} and attention_dropout {values[1]:g}"
        reading.ignore(f"{words}: a job has one for both")


ROWS = key_table.rows_of("megatron", globals())
