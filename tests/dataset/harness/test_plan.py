"""Plans are checked whole, before anything starts."""

from __future__ import annotations

from typing import Any

import harness_jobs as jobs
import pytest

from stepsight.dataset.harness.base.errors import HarnessError
from stepsight.dataset.harness.plan.plan_checks import check_plan, job_problems, num_micro_batches, ranks_needed
from stepsight.dataset.job.job import Job

EVENTS = {
    "name": "e",
    "world_size": 2,
    "seconds": 1,
    "ops": [{"kind": "add", "dims": [8], "dtype": "fp32"}],
    "collectives": [{"kind": "all_reduce", "num_bytes": 8, "group_size": 2, "ranks_per_node": 2}],
}


def test_options_are_filled_in_and_the_plan_is_left_alone() -> None:
    plan = {"schema": 1, "runs": [{"name": "a", "role": "train", "job": jobs.job()}], "events": [EVENTS]}
    checked = check_plan(plan)
    assert checked["runs"][0]["rounds"] == 3
    assert "rounds" not in plan["runs"][0]
    assert check_plan(checked) == checked
    assert {*map(ranks_needed, checked["runs"])} | {event["world_size"] for event in checked["events"]} == {1, 2}


def test_compiling_is_kept_only_where_it_is_asked_for() -> None:
    """So that plans of old are the same, byte for byte."""
    assert check_plan({**jobs.plan([]), "compile": True})["compile"] is True
    assert check_plan({**jobs.plan([]), "compile": False}) == check_plan(jobs.plan([]))
    with pytest.raises(HarnessError, match="compile must be true or false, and false in a box, got 1"):
        check_plan({**jobs.plan([]), "compile": 1})


def test_stages_of_t5_are_refused() -> None:
    with pytest.raises(HarnessError, match=r"share its tables of relative positions: .* t5 with pp = 1, got 2"):
        check_plan(jobs.plan([jobs.run("a", jobs.job(jobs.T5, pp=2))]))


def test_degrees_of_a_hand_written_plan_are_whole_numbers() -> None:
    job = jobs.job()
    job["parallel"]["cp"] = 1.5
    with pytest.raises(HarnessError, match=r"parallel\.cp must be a whole number >= 1, got 1\.5"):
        check_plan(jobs.plan([jobs.run("a", job)]))


def test_a_jobs_dictionary_is_a_valid_job() -> None:
    """The harness knows no ``Job``, but takes what one writes."""
    job = Job.from_dict(jobs.job(dp=2))
    check_plan(jobs.plan([jobs.run("a", job.to_dict())]))
    assert num_micro_batches(job.to_dict()) == job.num_micro_batches


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"zero_stage": 4}, "zero_stage 0 to 3, got 4"),
        ({"dp": 2, "zero_stage": 2, "overlap_grad_reduce": False}, "zero_stage 2 with .*overlap_grad_reduce = True"),
        ({"dp": 2, "tp": 2, "zero_stage": 1, "sequence_parallel": True}, "1 and 2 without sequence_parallel"),
        ({"recompute": "selective"}, "recompute none and full, got 'selective'"),
        ({"pp": 2, "schedule": "gpipe", "virtual_stages": 2}, "got 2 with 'gpipe'"),
        ({"schedule": "zb"}, "gpipe, 1f1b, zb-h1, looped-bfs, interleaved-zb, zbv, dualpipev, got 'zb'"),
        ({"pp": 2, "schedule": "zbv"}, "got 1 with 'zbv'"),
        ({"pp": 3, "virtual_stages": 2}, r"or a multiple, got 4 % 3 = 1"),
        ({"pp": 2, "schedule": "zb-h1"}, "a run with schedule zb-h1 has its table"),
        ({"tp": 3}, r"parallel\.tp must divide model\.heads, got 4 % 3"),
        ({"dp": 3}, r"micro_batch \* dp must divide global_batch, got 8 % \(2 \* 3\)"),
        ({"pp": 8}, "as many micro-batches as stages, got 4 < 8"),
        ({"pp": 4}, "every pipeline stage needs a layer: layers >= pp, got 3 < 4"),
        ({"cp": 3}, r"2 \* parallel\.cp .* must divide seq_len, got 8 % 6 = 2"),
        ({"dp": 2, "ep": 2}, r"parallel\.ep > 1 needs model\.experts, got ep = 2"),
        ({"runtime": "asynchronous"}, "PyTorch's own pipeline runtime, got 'asynchronous'"),
        ({"stage_layers": [1, 2]}, r"parallel\.stage_layers = \[\], got \[1, 2\]"),
        ({"gradient_dtype": "fp32"}, r"parallel\.gradient_dtype = '', got 'fp32'"),
        ({"scatter_p2p": True}, r"parallel\.scatter_p2p = False, got True"),
        ({"dp": 2, "dp_shard": 1}, r"over all 2 replicas \(dp_shard\), got 1"),
    ],
)
def test_what_the_harness_cannot_run_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(HarnessError, match=text):
        check_plan(jobs.plan([jobs.run("a", jobs.job(**changes))]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": {"heads": 3}}, r"model\.heads must divide hidden, got 16 % 3"),
        ({"model": {"family": "vit"}}, "families gpt, llama, bert and t5, got 'vit'"),
        ({"model": {"fused_attention": False}}, r"model\.fused_attention = True, got False"),
        ({"model": {"encoder_layers": 2}}, r"model\.encoder_layers = 0 but for t5, got 2"),
        ({"model": {**jobs.T5, "fused_attention": True}}, r"t5's learned bias: .*fused_attention = False, got True"),
        ({"model": {**jobs.T5, "encoder_seq_len": "9"}}, r"encoder_seq_len of t5 must be a whole number > 0, got '9'"),
        ({"model": {**jobs.T5, "kv_heads": 2}}, "t5 with kv_heads = heads, got 2 and 4"),
        ({"model": {"attention_kernels": "flash-2"}}, r"model\.attention_kernels = '', got 'flash-2'"),
        ({"model": {"dropout": 0.1}}, r"model\.dropout = 0, got 0\.1"),
        ({"model": {"experts": 8}}, "gated and without biases .*, got family 'gpt'"),
        ({"model": {**jobs.MIXTURE, "capacity_factor": 1.25}}, r"model\.capacity_factor = 1, got 1\.25"),
        ({"model": {**jobs.MIXTURE, "experts": 5}}, r"experts must divide a micro-batch's rows .*, got 32 % 5 = 2"),
        ({"model": {**jobs.MIXTURE, "shared_experts": 1}}, r"model\.shared_experts = 0, got 1"),
        ({"model": jobs.MIXTURE, "parallel": {"tp": 2}}, r"mixtures of experts with parallel\.tp = 1, .*got 2"),
        ({"model": jobs.MIXTURE, "parallel": {"dp": 4, "ep": 2}}, r"ep = 1 or dp \* cp, got ep = 2 and .* = 4"),
        ({"model": jobs.T5, "parallel": {"cp": 2}}, r"so t5 with cp = 1, got 2"),
        ({"model": {"layers": "3"}}, r"model\.layers must be a whole number, got '3'"),
        ({"model": {"layers": True}}, r"model\.layers must be a whole number, got True"),
        ({"model": {"layers": 0}}, r"model\.layers must be > 0, got 0"),
        ({"model": {"layers": 10**400}}, r"model\.layers must be a whole number"),
        ({"parallel": {"tp": "2"}}, r"parallel\.tp must be a whole number, got '2'"),
        ({"parallel": 3}, "parallel of a job must be a table, got 3"),
        ({"batch": {"precision": "fp8"}}, "precisions fp32, bf16, pure-bf16 and pure-fp16, got 'fp8'"),
        ({"batch": {"precision": "bf16"}}, 'execution.engine = "eager-pytorch" must say so'),
        ({"cluster": {"nodes": 2}}, r"tp \* pp \* dp must equal the number of devices"),
        ({"model": {"lora_rank": 4, "lora_targets": ["qkv"]}}, r"model\.lora_rank = 0, got 4"),
        ({"model": {**jobs.MIXTURE, "dense_layers": 1}}, r"model\.dense_layers = 0, got 1"),
        ({"optimizer": {"fused": False}}, r"optimizer\.fused = True, got False"),
    ],
)
def test_a_job_that_is_none_is_refused(changes: dict[str, Any], text: str) -> None:
    """A plan written by hand is held to the rules of jobs, without ``Job``."""
    job = jobs.job()
    for table, keys in changes.items():
        job[table] = {**job.get(table, {}), **keys} if isinstance(keys, dict) else keys
    with pytest.raises(HarnessError, match=text) as caught:
        check_plan(jobs.plan([jobs.run("a", job)]))
    assert "\n" not in str(caught.value)


# What the ranks read of a job, and what only counts with a value that is refused, or with experts.
USED = {
    "model": "name layers hidden heads kv_heads ffn vocab seq_len gated_mlp tied_embeddings experts experts_per_token "
    "expert_ffn moe_every encoder_layers encoder_seq_len fused_attention",
    "parallel": "tp cp pp ep dp sequence_parallel zero_stage bucket_mbytes overlap_grad_reduce virtual_stages",
    "batch": "micro_batch global_batch",
    "optimizer": "",
}
WITHOUT_EFFECT = {
    "model": "q_lora_rank kv_lora_rank rope_head_dim v_head_dim patch_dim tables dense_features bottom_mlp top_mlp "
    "interaction cross_layers cross_rank lora_targets lora_dropout capacity_factor",
    "parallel": "expert_tp",
    "batch": "fp8_parameters fp8_attention fp8_activations",
}


def changed(value: Any) -> Any:
    other = {bool: not value, str: "another", tuple: ["another"]}
    return other.get(type(value), value + 1 if isinstance(value, int | float) else True)


@pytest.mark.parametrize("section", USED)
@pytest.mark.parametrize("model", [{}, jobs.LLAMA, jobs.T5, jobs.MIXTURE], ids=["gpt", "llama", "t5", "mixture"])
def test_every_field_of_a_job_is_used_or_refused(section: str, model: dict[str, Any]) -> None:
    """A run that ignores a field would be measured as another job."""
    job = Job.from_dict(jobs.job(model, dp=2)).to_dict()
    assert not job_problems(job)
    others = {key: {**job[section], key: changed(value)} for key, value in job[section].items()}
    quiet = {key for key, other in others.items() if not job_problems({**job, section: other})}
    assert quiet <= {*f"{USED[section]} {WITHOUT_EFFECT.get(section, '')}".split()}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ([], "schema = 1, got 'list'"),
        ({"schema": 2}, "schema = 1, got 2"),
        ({"schema": 1, "run": []}, "got also run"),
        ({"schema": 1, "runs": 3}, "runs of a plan must be a list of tables, got 3"),
        ({"schema": 1, "events": 3}, "events of a plan must be a list of tables, got 3"),
        ({"schema": 1, "runs": [3]}, r"list of tables, got \[3\]"),
        (jobs.plan([{**jobs.run("a", jobs.job()), "role": ""}]), "role must be a word, got ''"),
        (jobs.plan([jobs.run("a", jobs.job(), rounds=True)]), "rounds must be a whole number >= 1, got True"),
        (jobs.plan([], [{**EVENTS, "seconds": float("inf")}]), "seconds must be > 0, got inf"),
        (jobs.plan([], [{**EVENTS, "ops": 3}]), "ops must be a list, got 3"),
        (jobs.plan([], [{**EVENTS, "ops": [{"kind": "add", "dims": ["8"], "dtype": "fp32"}]}]), "an op has kind, dims"),
        (jobs.plan([], [{**EVENTS, "ops": [{"kind": "add", "dims": [8], "dtype": 1e300}]}]), "an op has kind, dims"),
        (jobs.plan([], [{**EVENTS, "collectives": [{"kind": "x", "num_bytes": 8}]}]), "a collective has kind"),
        (jobs.plan([jobs.run("../a", jobs.job())]), "name must be letters"),
        (jobs.plan([jobs.run("a", jobs.job()), jobs.run("a", jobs.job())]), "unique, got 'a' twice"),
        (jobs.plan([jobs.run("a", jobs.job(), warmup=1)]), "warmup must be a whole number >= 2, got 1"),
        (jobs.plan([{"name": "a", "job": jobs.job()}]), "role must be a word, got None"),
        (jobs.plan([jobs.run("a", {"model": {}})]), "a job needs model.family"),
        (jobs.plan([], [{**EVENTS, "world_size": 1}]), "group_size must be at most world_size, got 2 > 1"),
        (jobs.plan([], [{**EVENTS, "seconds": 0}]), "seconds must be > 0, got 0"),
    ],
)
def test_broken_plan_is_refused_with_rule_and_values(plan: Any, text: str) -> None:
    with pytest.raises(HarnessError, match=text):
        check_plan(plan)
