"""A job written as a configuration and read back is the same job, but for what the writer lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.formats import ConfigJob, read_configs, write_config, written_formats
from stepsight.dataset.job.job import Job, ModelSpec
from stepsight.dataset.job.specs import MODELS
from tests.simulator.any_job import jobs

ROOT = Path(__file__).parents[3]
EXAMPLES = ("gpt3-175b-1024-interleaved", "llama3-70b-fsdp-512", "deepseek-v3-2048", "mixtral-8x22b-ep-256")
# What follows from keys that are listed: degrees that are dropped leave more replicas, and a size may be written out.
LOSSY = {
    *("parallel.pp", "parallel.tp", "parallel.cp", "parallel.ep", "parallel.stage_layers", "parallel.expert_tp"),
    *("model.seq_len", "model.patch_dim", "model.family"),
}
FOLLOWS = {
    "parallel.dp": ("parallel.pp", "parallel.tp", "parallel.cp", "parallel.ep"),
    "parallel.dp_shard": ("parallel.dp", "parallel.pp", "parallel.tp", "parallel.cp", "parallel.zero_stage"),
    "model.kv_heads": ("model.attention",),
    "model.expert_ffn": ("model.experts",),
}


def written(job: Job, name: str, folder: Path) -> tuple[list[Path], set[str]]:
    """Files of a format (with the model's, where they state none), and the keys that it does not express."""
    names = {"deepspeed": ("huggingface", name), "accelerate": ("huggingface", name)}.get(name, (name,))
    paths, ignored = [], set[str]()
    for one in names:
        text = write_config(job, one)
        paths.append(folder / f"{one}{text.suffix}")
        paths[-1].write_text(text.text)
        ignored |= {line.partition(" = ")[0] for line in text.ignored}
    return paths, ignored


def read_back(job: Job, paths: list[Path]) -> ConfigJob:
    cluster = {
        f"cluster.{key}": getattr(job.cluster, key) for key in ("hardware", "nodes", "devices_per_node", "fabric")
    }
    return read_configs(paths, Given(values={**cluster, "framework": job.framework}))


def differences(job: Job, back: Job, name: str) -> Iterator[str]:
    was, now = job.to_dict(), back.to_dict()
    for section in ("model", "parallel", "batch", "optimizer"):
        for key, value in was[section].items():
            if now[section][key] != value and not meaningless(job, f"{section}.{key}", now[section][key], name):
                yield f"{section}.{key}"


def meaningless(job: Job, key: str, now: Any, name: str) -> bool:
    """Whether a key has no effect in a job, or says the same in other words."""
    p, m, batch = job.parallel, job.model, job.batch
    parts = p.pp * p.virtual_stages
    even = [m.total_layers // parts + (part < m.total_layers % parts) for part in range(parts)]
    return {
        "parallel.stage_layers": now in ((), tuple(even)) and (p.stage_layers or tuple(even)) == tuple(even),
        "model.name": True,
        "model.head_dim": now == m.head_size,
        "model.expert_ffn": not m.experts,
        "model.experts_per_token": not m.experts,
        "model.dense_layers": not m.experts,
        "model.moe_every": not m.experts,
        "model.capacity_factor": not m.experts,
        "model.shared_experts": not m.experts,
        "model.attention_kernels": True,  # of the device, where a framework's name for it says less
        "parallel.expert_tp": not m.experts or p.tp == 1 or now in (0, p.experts_tp),
        "parallel.sequence_parallel": p.tp == 1,
        "parallel.overlap_tp": p.tp == 1 or p.overlap_tp == "",
        "parallel.overlap_ep": p.ep == 1,
        "parallel.context_parallel": p.cp == 1,
        "parallel.schedule": p.pp == 1,
        "parallel.scatter_p2p": True,
        "parallel.vocab_parallel": p.tp == 1,
        "parallel.runtime": True,
        "parallel.recompute_every": p.recompute != "full",
        "parallel.recompute": p.recompute == "full" and name == "deepspeed",  # a note tells where it is turned on
        "parallel.bucket_mbytes": not p.overlap_grad_reduce or str(now)[:4] == str(p.bucket_mbytes)[:4],
        "parallel.overlap_param_gather": p.zero_stage not in (1, 2),
        "parallel.prefetch": p.zero_stage < 3,
        "parallel.reshard_after_forward": p.zero_stage < 3 or p.shards == 1,
        "parallel.reduce_scatter": p.zero_stage != 1,
        "parallel.zero_stage": p.shards == 1,
        "parallel.dp_shard": p.shards == (now or p.dp) or p.zero_stage == 0,
        "parallel.gradient_dtype": batch.precision == "fp32" or p.gradient_dtype == "",
        "batch.fp8_scaling": batch.precision != "fp8",
        "optimizer.fused": job.optimizer.offload,
    }.get(key, False)


def check(job: Job, name: str, folder: Path) -> None:
    try:
        paths, ignored = written(job, name, folder)
    except JobError as error:
        assert "no model of the family" in str(error)
        return
    try:
        back = read_back(job, paths).job
    except JobError:
        assert ignored & LOSSY, (name, ignored)  # without them no job of the same batch exists
        return
    for key in differences(job, back, name):
        assert ignored & {key, *FOLLOWS.get(key, ())}, (name, key, sorted(ignored))


@pytest.mark.parametrize("name", [name for name in written_formats() if name != "huggingface"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples(example: str, name: str, tmp_path: Path) -> None:
    check(Job.from_file(ROOT / "examples" / f"{example}.toml"), name, tmp_path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=jobs())
def test_any_strategy_of_torchtitan(job: Job, tmp_path: Path) -> None:
    """Its TOML names a model by its flavor, so the model is one of these."""
    model = ModelSpec(**{**MODELS["llama3-8b"], "seq_len": 1024, "eager_kernels": job.model.eager_kernels})
    parallel = replace(job.parallel, stage_layers=(), ep=1, expert_tp=0)
    check(replace(job, model=model, parallel=parallel), "torchtitan", tmp_path)


@pytest.mark.parametrize("name", ["megatron-script", "nanotron", "maxtext", "deepspeed", "accelerate"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=jobs())
def test_any_job(job: Job, name: str, tmp_path: Path) -> None:
    check(job, name, tmp_path)


def test_megatron_expresses_all_of_its_own_strategies() -> None:
    job = Job.from_file(ROOT / "examples" / "gpt3-175b-1024-interleaved.toml")
    assert write_config(job, "megatron").ignored == ()


def test_what_is_not_expressed_is_listed() -> None:
    job = Job.from_file(ROOT / "examples" / "gpt3-175b-1024-zero-bubble.toml")
    assert "parallel.schedule = zb-h1" in write_config(job, "megatron").ignored
    assert {"parallel.tp = 8", "parallel.pp = 16"} & set(write_config(job, "accelerate").ignored)


def test_what_torchtitan_always_does_is_listed_where_a_job_does_otherwise() -> None:
    """Its products are separate, and its tensor parallelism copies: both come back with its profile."""
    job = Job.from_file(ROOT / "examples" / "llama3-70b-fsdp-512.toml")
    model, parallel = replace(job.model, separate_linears=True), replace(job.parallel, tp=2, dp=256, overlap_tp="torch")
    own = replace(job, model=model, parallel=replace(parallel, sequence_parallel=True))
    other = replace(own, model=replace(model, separate_linears=False), parallel=replace(own.parallel, overlap_tp=""))
    keys = "model.separate_linears = False", "parallel.overlap_tp = (none)"
    for each, told in ((own, ()), (other, keys)):
        ignored = [
            line for line in write_config(each, "torchtitan").ignored if line.startswith(("model.s", "parallel.o"))
        ]
        assert tuple(ignored) == told


def test_what_has_no_effect_on_one_rank_is_listed(tmp_path: Path) -> None:
    """Files state how contexts are cut even where one rank holds them whole: neither direction drops that unseen."""
    args = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --cp-comm-type p2p\n"
    (tmp_path / "args.txt").write_text(args)
    found = read_configs(tmp_path / "args.txt")
    assert "parallel.context_parallel" not in found.mapped and "--cp-comm-type p2p" in found.ignored
    job = Job.from_file(ROOT / "examples" / "gpt3-175b-1024-interleaved.toml")
    gathered = replace(job, parallel=replace(job.parallel, context_parallel="all_gather"))
    assert "parallel.context_parallel = all_gather" in write_config(gathered, "megatron").ignored


@pytest.mark.parametrize(("kind", "every", "option"), [("selective", 1, "op"), ("full", 2, "2"), ("full", 3, "3")])
def test_recomputation_of_torchtitan(kind: str, every: int, option: str, tmp_path: Path) -> None:
    """Its selective recomputation is that of ops, or of every n-th layer."""
    job = Job.from_file(ROOT / "examples" / "llama3-70b-fsdp-512.toml")
    job = replace(job, framework="", parallel=replace(job.parallel, recompute=kind, recompute_every=every))
    paths, _ = written(job, "torchtitan", tmp_path)
    assert f'selective_ac_option = "{option}"' in paths[0].read_text()
    back = read_back(job, paths)
    assert (back.job.parallel.recompute, back.job.parallel.recompute_every) == (kind, every)
    key = "parallel.recompute" if option == "op" else "parallel.recompute_every"
    assert f"selective_ac_option {option}" in back.sources[key]


@pytest.mark.parametrize("name", ["huggingface", "megatron", "megatron-script", "nanotron", "maxtext"])
def test_a_padded_vocabulary(name: str) -> None:
    """A job keeps the padded one: the writer states the job's or the model's own where that is known, else says so."""
    sizes: dict[str, Any] = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 32000, "seq_len": 64}
    tables: dict[str, Any] = {
        "framework": "megatron-core",
        "model": sizes,
        "parallel": {"tp": 4},
        "batch": {"micro_batch": 1, "global_batch": 2, "precision": "bf16"},
        "cluster": {"hardware": "h100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
    }
    unknown = write_config(Job.from_dict({**tables, "model": {**sizes, "vocab": 32256}}), name)
    assert "32256" in unknown.text
    assert any("vocabulary of 32256 is padded to a multiple of 512" in note for note in unknown.notes)
    stated = Job.from_dict(tables)
    for tp in (4, 1):  # also in another strategy
        job = replace(
            stated, parallel=replace(stated.parallel, tp=tp, dp=8 // tp), batch=replace(stated.batch, global_batch=8)
        )
        own = write_config(job, name)
        assert job.model.vocab == 32256 and "32000" in own.text and "32256" not in own.text
        assert not any("padded" in note for note in own.notes)
    known = Job.from_dict({**tables, "model": {"name": "llama2-7b", "seq_len": 64}})
    written_known = write_config(known, name)
    assert known.model.vocab == 32256 and "32000" in written_known.text and "32256" not in written_known.text
    assert any("32000 is that of llama2-7b; the job's 32256 is padded" in note for note in written_known.notes)
    plain = write_config(Job.from_dict({**tables, "framework": ""}), name)
    assert "32000" in plain.text and not any("padded" in note for note in plain.notes)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(JobError, match="must be of megatron"):
        write_config(Job.from_file(ROOT / "examples" / "gpt3-175b-1024.toml"), "fairseq")


def test_a_script_for_several_nodes_says_where_they_meet() -> None:
    job = Job.from_file(Path(__file__).parents[3] / "examples" / "gpt3-175b-1024.toml")
    (launch,) = [line for line in write_config(job, "megatron-script").text.splitlines() if "torchrun" in line]
    assert all(word in launch.partition("pretrain_gpt.py")[0] for word in ("--node-rank", "--master-addr", "--nnodes"))
