"""What rows say goes into jobs; what they leave open is filled by rule or is a reason to leave them out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.hardware.hardware_facts import LaunchCalls
from stepsight.dataset.job.frameworks import release_month
from stepsight.dataset.job.job import Job
from stepsight.experiments.evaluation.error_metrics import score
from stepsight.experiments.evaluation.row_jobs import PublishedJob, framework_of, jobs_of, precision_of
from stepsight.experiments.evaluation.runs_table import Row, RowError
from stepsight.training.corrections.releases import drift_of
from tests.experiments.evaluation.run_tables import digest_of, job_of, run_row


def test_a_whole_row() -> None:
    """Sizes, degrees and batch as they stand; the vocabulary padded and attention unfused as the framework has it."""
    job = job_of(run_row()).job
    m, p = job.model, job.parallel
    assert (m.layers, m.hidden, m.ffn, m.heads, m.kv_heads, m.seq_len) == (8, 1024, 4096, 16, 16, 1024)
    assert m.vocab == 50688 and not m.fused_attention and m.tied_embeddings  # 99 * 128 * 4
    assert (p.tp, p.pp, p.dp, p.zero_stage, p.recompute) == (4, 2, 2, 0, "full")
    assert not p.overlap_grad_reduce and not p.sequence_parallel and job.optimizer.clip_grad_norm
    assert (job.batch.micro_batch, job.batch.global_batch, job.batch.precision) == (2, 64, "fp16")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0", (0, 0, True)),
        ("1", (1, 0, True)),
        ("distopt(zero1)", (1, 0, True)),
        ("zero1 over all DP", (1, 0, True)),
        ("zero1 within groups of 2 (hybrid)", (1, 2, True)),
        ("zero1 within groups of 8 (hybrid)", (1, 0, True)),
        ("fsdp2(zero3)", (3, 0, True)),
        ("fsdp=4", (3, 4, True)),
        ("hsdp (shard in node, replicate across)", (3, 8, True)),
        ("fsdp (zero2-like: no reshard after forward)", (3, 0, False)),
    ],
)
def test_words_for_sharding(text: str, expected: tuple[int, int, bool]) -> None:
    """Stage, group and resharding; a group of all replicas is no group."""
    dp = 16 if "hsdp" in text or "=" in text else 8
    job = job_of(run_row(zero_stage=text, tp=16 // dp, pp=1, dp=dp, framework="torchtitan")).job
    p = job.parallel
    assert (p.zero_stage, p.dp_shard, p.reshard_after_forward) == expected


@pytest.mark.parametrize(
    ("framework", "text", "expected"),
    [
        ("NeMo", "", ("none", 1)),
        ("NeMo-Megatron", "none (block, 0 layers)", ("selective", 1)),
        ("Megatron-LM", "selective (attention core)", ("selective", 1)),
        ("torchtitan", "selective op", ("full", 2)),
        ("torchtitan", "full", ("full", 1)),
    ],
)
def test_words_for_recomputation(framework: str, text: str, expected: tuple[str, int]) -> None:
    """What selective means, and what is done where nothing is said, depends on the framework."""
    p = job_of(run_row(framework=framework, recompute=text)).job.parallel
    assert (p.recompute, p.recompute_every) == expected


def test_flags_of_a_row_go_before_its_frameworks() -> None:
    """Overlap and bucket size as a recipe states them."""
    notes = "yaml flags: ub_tp_comm_overlap=false overlap_grad_sync=False overlap_param_sync=true bucket_cap_mb=75"
    # Launch scripts switch the overlap on that the first flag switches off.
    published = job_of(run_row(framework="NeMo", notes=notes))
    p = published.job.parallel
    assert (p.overlap_grad_reduce, p.overlap_param_gather, p.bucket_mbytes) == (False, True, 75.0)
    assert published.framework.overlap_tp == published.job.parallel.overlap_tp == "split"
    plain = job_of(run_row(framework="NeMo", notes="bucket_cap_mb=None")).framework
    assert plain.overlap_tp == "split" and plain.bucket_mbytes == 400.0
    default = job_of(run_row(precision="amp_bf16; MP mode DEFAULT"))
    assert (default.framework.gradients, default.job.execution.checkpoint) == ("fp32", "early-stop")


@pytest.mark.parametrize(
    ("precision", "software", "scaling", "narrow"),
    [
        ("FP8-CS", "25.11 NeMo Container", "current", True),
        ("FP8", "26.04.01 NeMo Container", "current", True),
        ("MXFP8", "26.06 NeMo Container", "mxfp8", True),
        ("NVFP4", "26.02 NeMo Container", "current", False),
        ("fp8", "NeMo (v25.04 recipes)", "delayed", True),
    ],
)
def test_scales_and_parameters_in_few_bits(precision: str, software: str, scaling: str, narrow: bool) -> None:
    """Bridge's recipes scale fp8 by what tensors hold, and keep no parameters in 4 bits."""
    framework = framework_of(run_row(hardware="GB200", precision=precision, framework=software))
    assert (framework.fp8_scaling, framework.fp8_parameters) == (scaling, narrow)


def test_mlperf_states_buckets_and_scales() -> None:
    """768e6 elements in 16 bits: BUCKET_SIZE of the configurations of Llama 3.1 8B in round 5.1."""
    row = run_row(source="MLPerf Training v5.1 llama31_8b", framework="NeMo", date="2025-09", precision="fp8")
    framework = framework_of(row)
    assert (framework.fp8_scaling, round(framework.bucket_mbytes * 2**20 / 1e8)) == ("current", round(768e6 * 2 / 1e8))


@pytest.mark.parametrize(
    ("name", "hardware", "precision", "container", "expected"),
    [
        ("Qwen3_30B_a3B", "GB200", "MXFP8", "26.06 NeMo Container", (True, True)),
        ("Qwen3_30B_a3B", "B200", "MXFP8", "26.06 NeMo Container", (False, False)),
        ("Qwen3_30B_a3B", "B200", "BF16", "26.06 NeMo Container", (False, False)),
        ("Qwen3_30B_a3B", "B200", "MXFP8", "26.04.01 NeMo Container", (False, False)),
        ("Qwen3_235B_a22B", "H100-SXM", "FP8", "26.02 NeMo Container", (True, False)),
        ("Qwen3_235B_a22B", "B200", "MXFP8", "26.02 NeMo Container", (False, False)),
    ],
)
def test_containers_overlap_and_fuse_experts(
    name: str, hardware: str, precision: str, container: str, expected: tuple[bool, bool]
) -> None:
    """Recipes of June 2026 do so in MXFP8 on GB200; those of Qwen3 235B on H100 always overlapped."""
    row = run_row(model_name=name, hardware=hardware, precision=precision, framework=container)
    framework = framework_of(row)
    assert (framework.overlap_ep, framework.fused_experts) == expected


def test_a_papers_year_tells_generations_of_a_framework_apart() -> None:
    """Megatron-LM overlaps tensor-parallel collectives from 2022 on."""
    rows = {year: run_row(framework="Megatron-LM", source=f"Some et al. {year} Table 5") for year in (2021, 2022)}
    assert [job_of(row).job.parallel.overlap_tp for row in rows.values()] == ["", "backward"]


def test_embedding_and_loss_as_layers() -> None:
    """70 layers on 12 stages are 5, 6, ... 6, 5; what divides evenly stays even."""
    row: dict[str, Any] = {"gpus": 96, "nodes": 12, "tp": 8, "pp": 12, "dp": 1, "heads": 16}
    assert job_of(run_row(layers=70, **row)).job.parallel.stage_layers == (5, *[6] * 10, 5)
    assert job_of(run_row(layers=72, **row)).job.parallel.stage_layers == ()
    assert job_of(run_row(layers=71, **row)).job.parallel.stage_layers == ()


def test_mixtures() -> None:
    """Experts of a table's ``ffn``, unless the model is known better; cut by tensor parallelism where there is room."""
    row: dict[str, Any] = {"family": "moe", "experts": 8, "top_k": 2, "gated_mlp": 1, "framework": "NeMo"}
    job = job_of(run_row(**row, ep=2)).job
    assert (job.model.expert_ffn, job.model.experts_per_token, job.parallel.expert_tp) == (4096, 2, 0)
    assert job_of(run_row(**row, ep=8)).job.parallel.expert_tp == 1
    latent = job_of(run_row(**row, ep=2, model_name="DeepSeek-V3 (proxy)")).job.model
    assert (latent.attention, latent.expert_ffn, latent.ffn) == ("mla", 2048, 18432)


def test_what_rows_leave_out() -> None:
    """Rules for unknown cells."""
    row = run_row(heads="", ffn="", vp="", cp="", ep="", dp="", vocab="", model_name="GPT3-5B", tied_embeddings="")
    job = job_of(row).job
    assert (job.model.heads, job.model.ffn, job.model.tied_embeddings) == (8, 4096, True)
    assert (job.parallel.dp, job.parallel.virtual_stages, job.parallel.cp) == (2, 1, 1)
    assert job.model.vocab == 50688


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict.fromkeys(("vocab", "micro_batch", "recompute"), ""), "3 of its columns are unknown: vocab, recompute"),
        ({"recompute": "none/selective"}, "recompute is 'none/selective'"),
        ({"family": "dlrm"}, "no job has the family dlrm"),
        ({"precision": "FP4"}, "no job has the precision FP4"),
        ({"dp": 4}, "must be gpus, got"),
        ({"family": "llama", "ffn": "", "gated_mlp": ""}, "ffn is unknown"),
        ({"family": "moe"}, "experts is unknown"),
        ({"global_batch": 63}, "must divide global_batch"),
        ({"notes": "bucket_cap_mb=1.2.3"}, "bucket_cap_mb must be a number, got '1.2.3'"),
        ({"zero_stage": f"zero1 within groups of {'9' * 5000}"}, "a sharding group of zero_stage must lie within "),
        ({"inter_interconnect": f"{'9' * 5000} Gb/s"}, "inter_interconnect must lie within "),
        ({"hidden": 2**31}, "model.hidden must be > 0 and <= 16777216, got 2147483648"),
        ({"layers": 4, "vp": -3}, "parallel.virtual_stages must be > 0"),
        (
            {"layers": 1e15 - 2, "pp": 1e15, "gpus": 4e15, "nodes": 5e14, "tp": 4, "dp": 1},
            "model.layers must be > 0 and <= 10000",
        ),
        ({"iter_time_derivation": "e2e (optimizer step NOT included?)"}, "not that of a training iteration"),
    ],
)
def test_rows_that_no_job_says(changes: dict[str, Any], text: str) -> None:
    """Each has its reason."""
    with pytest.raises(JobError, match=text):
        job_of(run_row(**changes))


def test_words_for_precision() -> None:
    """The type of the large products."""
    words = {"fp16 mixed": "fp16", "BF16": "bf16", "amp_bf16; MP mode PURE": "bf16", "MXFP8": "fp8", "float8": "fp8"}
    assert {text: precision_of(text) for text in words} == words


@pytest.mark.parametrize(("notes", "eager"), [("FSDP eager", True), ("FSDP+compile+float8", False)])
def test_a_run_says_whether_it_was_compiled(notes: str, eager: bool) -> None:
    assert job_of(run_row(framework="torchtitan (FSDP2)", notes=notes)).job.model.eager_kernels is eager


@pytest.mark.parametrize(("recompute", "again"), [("none", True), ("full", False)])
def test_layers_that_are_recomputed_keep_their_norms(recompute: str, again: bool) -> None:
    model = job_of(run_row(framework="InternEvo", recompute=recompute)).job.model
    assert model.norms_again is again and model.token_metrics


def test_a_run_is_told_by_what_ran_and_how_long() -> None:
    """Not by its number, who tells of it, or what a framework's profile fills in; another time is another run."""
    own = digest_of(run_row())
    same: dict[str, Any] = {"row_id": 99, "source": "other", "tp": "4", "vocab": 50304, "framework": "megatron-lm 2022"}
    assert digest_of(run_row(**same, notes="overlap_grad_sync=true", model_name="another")) == own
    assert len({own, digest_of(run_row(iteration_time_s=1.01)), digest_of(run_row(micro_batch=1))}) == 3


@pytest.mark.parametrize(
    "framework", ["Megatron-LM", "torchtitan (FSDP2)", "NeMo (v25.02 recipes)", "Megatron-DeepSpeed"]
)
def test_a_job_file_that_names_its_framework_says_the_same(framework: str) -> None:
    """A row's job is that of the tables that state what the row states."""
    row = run_row(framework=framework, recompute="selective", zero_stage="1")
    tables: dict[str, Any] = {
        "framework": framework,
        "model": {
            "name": "GPT-x", "family": "gpt", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 50257,
            "seq_len": 1024, "tied_embeddings": True,
        },
        "parallel": {
            "tp": 4, "pp": 2, "virtual_stages": 1, "zero_stage": 1,
            "sequence_parallel": False, "recompute": "selective",
        },
        "batch": {"micro_batch": 2, "global_batch": 64, "precision": "fp16"},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 2, "devices_per_node": 8, "fabric": "dgx-a100"},
        "execution": {"date": release_month(framework)},
    }  # fmt: skip
    written, read = Job.from_dict(tables), job_of(row).job
    assert replace(written, framework="") == replace(read, framework="")
    assert drift_of(written) == drift_of(read)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"recompute": "fulll"}, "recompute is 'fulll': it must be none, selective, full"),
        ({"recompute": "selectively"}, "recompute is 'selectively'"),
        ({"precision": "bf16x"}, r"no job has the precision bf16x \(known: fp32, tf32, bf16"),
        ({"precision": "bf16/fp8"}, "no job has the precision bf16/fp8"),
        ({"zero_stage": "7"}, "zero_stage is '7': it must be 0 to 3"),
        ({"zero_stage": "zero13"}, "zero_stage is 'zero13'"),
        ({"zero_stage": "some"}, "zero_stage is 'some'"),
        ({"family": "gptt"}, r"no job has the family gptt \(known: gpt, llama"),
        ({"hardware": "h100-quux"}, "no hardware preset for 'h100-quux'"),
    ],
)
def test_what_is_nearly_a_word_is_none(changes: dict[str, Any], text: str) -> None:
    """It is left out with its value and what is allowed, not taken for the word."""
    with pytest.raises(RowError, match=text):
        job_of(run_row(**changes))


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({}, "deepspeed"),
        ({"date": "2021-04"}, "deepspeed-2021"),
        ({"date": "2023-01"}, "deepspeed"),
        ({"source": "SC'21 table 2"}, "deepspeed-2021"),
        ({"source": "Somebody et al. 2022"}, "deepspeed"),
        ({"date": "2022-05", "source": "SC21"}, "deepspeed"),
    ],
)
def test_the_date_of_a_run_chooses_the_profile(cells: dict[str, str], name: str) -> None:
    """Its own date goes before that of the paper which tells of it."""
    row = Row({"source": "lab", "framework": "DeepSpeed ZeRO-3", "notes": "", "precision": "fp16", **cells})
    assert framework_of(row).name == name


@pytest.mark.parametrize(("hardware", "container", "calls"), [
    ("H100-SXM", "26.02 NeMo Container", 195.0),
    ("GB200", "26.02 NeMo Container", 0.0),
    ("B200", "26.02 NeMo Container", 195.0),
    ("B200", "26.04 NeMo Container", 0.0),
])  # fmt: skip
def test_hosts_of_dispatchers_by_container(hardware: str, container: str, calls: float) -> None:
    """Graphs around the dispatch and HybridEP leave the host little to do."""
    row = run_row(model_name="Qwen3_30B_a3B", hardware=hardware, precision="BF16", framework=container)
    assert framework_of(row).dispatch_calls == calls


@pytest.mark.parametrize(("source", "model", "calls"), [
    ("Megatron-LM CI gpt H100", "gpt3_mcore_te_tp1_pp4_vp1", (15.0, 195.0)),
    ("Megatron-LM CI moe A100", "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel", (15.0, 80.0)),
    ("Megatron-LM CI moe GB200", "gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4", (15.0, 195.0)),
    ("MLPerf llama2_70b_lora", "Llama-2-70B LoRA", (1.0, 195.0)),
])  # fmt: skip
def test_hosts_of_functional_tests_and_of_captured_layers(source: str, model: str, calls: tuple[float, float]) -> None:
    """Tests of a few experts gather all tokens, with less host code than for all-to-alls; MLPerf's LoRA has graphs."""
    software = "NeMo" if "MLPerf" in source else "Megatron-LM"
    framework = framework_of(run_row(source=source, model_name=model, framework=software, date="2026-03"))
    assert (framework.op_calls, framework.dispatch_calls) == calls


@pytest.mark.parametrize(("recipes", "vocab"), [("v24.11.1", 51200), ("v25.02", 51200), ("v25.04", 129024)])
def test_recipes_with_the_tokenizer_of_gpt2(recipes: str, vocab: int) -> None:
    """Llama 3.1 405B was measured with 50257 tokens, padded to a multiple of 128 for each tensor-parallel rank."""
    row = run_row(
        model_name="Llama 3.1 405b BF16", framework=f"NeMo ({recipes} recipes)", vocab="128256", tp=8, pp=1, dp=2
    )
    assert job_of(row).job.model.vocab == vocab


@pytest.mark.parametrize(
    ("software", "dropout"),
    [("NeMo container 24.07 (2024-08-14)", 0.1), ("NeMo (v25.02 recipes)", 0.1), ("NeMo (v25.04 recipes)", 0.0)],
)
def test_gpt3_has_dropout_in_the_recipes_that_state_it(software: str, dropout: float) -> None:
    assert job_of(run_row(model_name="GPT3-5B", framework=software)).job.model.dropout == dropout
    assert job_of(run_row(model_name="LLAMA3-8B", framework=software)).job.model.dropout == 0.0


@pytest.mark.parametrize(("name", "nodes"), [("GPT3-5B (Paxml)", 1), ("GPT3-175B (Paxml)", 16)])
def test_models_of_paxml_share_parameters_within_some_nodes(name: str, nodes: int) -> None:
    software = "PaxML (JAX) (v24.11.1 recipes)"
    sizes = {"nodes": 32, "gpus": 256, "tp": 1, "pp": 1, "dp": 256, "global_batch": 512, "micro_batch": 2}
    row = run_row(model_name=name, framework=software, zero_stage="fsdp", **sizes)
    assert job_of(row).job.parallel.dp_shard == 8 * nodes


def test_layers_that_recipes_offload() -> None:
    """Megatron-Bridge's FSDP of Llama 3 70B on GB200: 20 layers in bf16, 40 in 8 bits, none that are repeated."""
    sizes = {"model_name": "LLAMA3_70B", "hardware": "GB200", "layers": 80, "tp": 1, "pp": 1, "recompute": "none"}
    for more, layers in (({"precision": "bf16"}, 20), ({"precision": "FP8-CS"}, 40), ({"recompute": "full"}, 0)):
        row = run_row(
            **{
                **sizes,
                "nodes": 2,
                "gpus": 8,
                "gpus_per_node": 4,
                "dp": 8,
                "gpu_mem_gb": 186,
                "zero_stage": "megatron-fsdp(64)",
                "framework": "26.04 NeMo Container",
                **more,
            }
        )
        parallel = job_of(row).job.parallel
        assert (parallel.offload_activations, parallel.offload_layers) == (layers > 0, layers)


def test_torchtitan_cuts_a_batch_into_as_many_micro_batches_as_pipeline_ranks() -> None:
    """2 pipeline ranks and 2 replicas cut 64 sequences into micro-batches of 16; other frameworks leave it open."""
    row = run_row(framework="torchtitan", micro_batch="", vp="", notes="Interleaved 1F1B")
    (published,) = jobs_of(row)
    assert (published.job.batch.micro_batch, published.job.parallel.virtual_stages) == (16, 2)
    assert len(jobs_of(run_row(framework="NeMo", micro_batch="", vp="1"))) > 1


@pytest.mark.parametrize(("name", "recompute"), [("GPT3-5B (Paxml)", "selective"), ("GPT3-175B (Paxml)", "full")])
def test_policies_of_paxml_go_with_the_model(name: str, recompute: str) -> None:
    """Its recipes state them; of another model all three possibilities stay open."""
    row = run_row(model_name=name, framework="PaxML (JAX) (v24.11.1 recipes)", recompute="")
    (published,) = jobs_of(row)
    assert published.job.parallel.recompute == recompute
    other = run_row(model_name="GPT-x", framework="PaxML (JAX) (v24.11.1 recipes)", recompute="")
    assert len(jobs_of(other)) == 3


def test_columns_of_software() -> None:
    """The container chooses the profile, the attention library its kernels; versions and kernels go to the job."""
    row = run_row(framework="NeMo", container="nvcr.io/nvidia/nemo:26.06", nccl="2.27.3", kernels="SGLang")
    found = job_of(row)
    assert found.framework.name == "nemo-2026-06" and found.framework.attention == "flash-3"
    assert (found.job.execution.nccl, found.job.execution.kernels) == ("2.27.3", "SGLang")
    older = framework_of(run_row(framework="NeMo", attention="flash-attn 2.5.8"))
    assert older == replace(framework_of(run_row(framework="NeMo")), attention="flash-2")
    with pytest.raises(JobError, match="attention must be"):
        framework_of(run_row(attention="xformers"))


def _values(jobs: list[PublishedJob], key: str) -> list[Any]:
    return [getattr(one.job.parallel, key, None) or getattr(one.job.batch, key, None) for one in jobs]


def test_a_full_row_means_one_job() -> None:
    (only,) = jobs_of(run_row())
    assert only.open == ""


@pytest.mark.parametrize(
    ("column", "key", "values"),
    [
        ("recompute", "recompute", ["none", "selective", "full"]),
        ("micro_batch", "micro_batch", [1, 2, 4, 8]),
        ("zero_stage", "zero_stage", [None, 1]),
    ],
)
def test_an_open_cell_takes_each_of_its_values(column: str, key: str, values: list[Any]) -> None:
    found = jobs_of(run_row(**{column: ""}))
    assert _values(found, key) == values
    assert column in found[0].open


def test_a_vocabulary_may_be_small_or_large() -> None:
    small, large = jobs_of(run_row(vocab=""))
    assert (small.job.model.vocab, large.job.model.vocab) == (32256, 256000)  # padded to 128 * tp


def test_stages_may_interleave_where_the_framework_usually_does() -> None:
    """Silence about virtual stages means one for each layer for NeMo, and means one chunk for Megatron-LM of 2021."""
    assert _values(jobs_of(run_row(framework="NeMo", vp="")), "virtual_stages") == [4]
    assert _values(jobs_of(run_row(framework="NeMo", vp=2)), "virtual_stages") == [2]
    assert _values(jobs_of(run_row(vp="")), "virtual_stages") == [1]


def test_what_does_not_fit_the_memory_did_not_run() -> None:
    big = {"layers": 48, "hidden": 8192, "ffn": 32768, "heads": 64, "seq_len": 8192}
    found = jobs_of(run_row(**big, recompute="", micro_batch=1, tp=8, pp=2, dp=1, framework="Megatron-LM"))
    assert _values(found, "recompute") == ["full"]


def test_the_interval_holds_every_job_and_the_answer_lies_between() -> None:
    row = run_row(recompute="", framework="Megatron-LM")
    both = score(row, lambda hardware: None)
    ends = [score(run_row(recompute=word), lambda hardware: None) for word in ("none", "selective", "full")]
    assert both.low_s == min(one.low_s for one in ends)
    assert both.high_s == max(one.high_s for one in ends)
    assert math.log(both.predicted_s) == pytest.approx(sum(math.log(one.predicted_s) for one in ends) / 3)
    assert both.open == "recompute (none or selective or full)"
    assert sum(both.breakdown.values()) == pytest.approx(both.predicted_s)


@pytest.mark.parametrize(("column", "cell"), [("vp", "abc"), ("vp", "0.5"), ("gated_mlp", "-1"), ("gated_mlp", "1e17")])
def test_cells_that_are_no_numbers_or_flags_leave_the_row_out(column: str, cell: str) -> None:
    """Also where the number would have no effect: virtual stages of a job without a pipeline."""
    with pytest.raises(RowError, match=f"{column} must be"):
        jobs_of(run_row(**{"pp": 1, "tp": 2, "dp": 8, column: cell}))


def test_a_row_with_the_layout_of_a_later_configuration() -> None:
    """The launcher's tables came with release 22.08, whose layouts count; rows of others keep theirs."""
    cells = {"model_name": "GPT3-175B", "framework": "NeMo-Megatron", "gpus": 128, "nodes": 16, "layers": 96}
    cells |= {"dp": 4, "pp": 8, "vp": 4, "micro_batch": 1, "recompute": "none (block, 0 layers)"}
    source = "NeMo-Megatron Launcher README node-scaling tables (A100)"
    known, other = (job_of(run_row(**cells, source=name)).job for name in (source, "lab"))
    assert (known.parallel.tp, known.parallel.virtual_stages, known.parallel.dp) == (8, 1, 2)
    assert (known.batch.micro_batch, known.parallel.recompute) == (2, "full")
    assert (other.parallel.tp, other.batch.micro_batch, other.parallel.recompute) == (4, 1, "selective")


def test_bloom_ran_with_launches_that_block() -> None:
    found = job_of(run_row(framework="Megatron-DeepSpeed (ZeRO-1 + PP)")).job.execution
    assert found.launches == LaunchCalls(3.0, 0.0, blocking=True)
