"""Jobs validate everything at once and read back what they write."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job


def tables(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    base: dict[str, dict[str, Any]] = {
        "model": {"family": "gpt", "layers": 8, "hidden": 256, "heads": 8, "vocab": 1024, "seq_len": 64},
        "parallel": {"tp": 2, "pp": 2},
        "batch": {"micro_batch": 1, "global_batch": 8},
        "cluster": {"hardware": "a100-sxm-80gb", "nodes": 1, "devices_per_node": 8},
    }
    return {section: {**table, **changes.get(section, {})} for section, table in base.items()}


def test_defaults_are_filled() -> None:
    """dp is what remains of the cluster; kv_heads, ffn and the MLP follow the model."""
    job = Job.from_dict(tables())
    assert (job.parallel.dp, job.model.kv_heads, job.model.ffn, job.model.gated_mlp) == (2, 8, 1024, False)
    assert job.num_micro_batches == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel": {"dp": 3}}, r"tp \* pp \* dp must equal the number of devices, got 2 \* 2 \* 3 = 12 != 8"),
        ({"model": {"heads": 7}}, "heads must divide hidden, got 256 % 7 = 4"),
        ({"model": {"kv_heads": 3}}, "kv_heads must divide heads, got 8 % 3 = 2"),
        ({"model": {"layers": 10**20}}, "model.layers must be > 0 and <= 10000"),
        ({"batch": {"global_batch": 2**30}}, r"micro-batches \* pp must be <= 1048576, got"),
        ({"model": {"laeyrs": 3}}, r"unknown key model.laeyrs \(known: .*\) \(did you mean 'layers'"),
        ({"model": {"layers": 0}}, "model.layers must be > 0 and <= 10000, got 0"),
        ({"model": {"layers": True}}, "model.layers must be a whole number, got True"),
        ({"model": {"hidden": "256"}}, "model.hidden must be a whole number, got '256'"),
        ({"batch": {"global_batch": 7}}, r"micro_batch \* dp must divide global_batch, got 7"),
        ({"batch": {"micro_batch": -1}}, "batch.micro_batch must be > 0 and <= 2147483648, got -1"),
        ({"parallel": {"schedule": "zigzag"}}, "parallel.schedule must be one of gpipe, 1f1b, .*got 'zigzag'"),
        ({"parallel": {"tp": 3, "pp": 1, "dp": 1}}, "tp must divide model.heads, got 8 % 3"),
        ({"cluster": {"fabric": "nope"}}, "fabric must be one of"),
        ({"cluster": {"fabric": {"intra_node": {}}}}, "fabric.intra_node must be a table"),
        ({"model": {"layers": 1}}, "layers >= pp, got 1 < 2"),
    ],
)
def test_broken_rules_are_named(changes: dict[str, Any], text: str) -> None:
    """Each mistake is a JobError with the rule and the values."""
    with pytest.raises(JobError, match=text):
        Job.from_dict(tables(**changes))


def test_all_problems_at_once() -> None:
    """Two mistakes are reported together."""
    with pytest.raises(JobError, match=r"model\.layers.*batch\.micro_batch"):
        Job.from_dict(tables(model={"layers": -1}, batch={"micro_batch": 0}))


@pytest.mark.parametrize("missing", ["model", "batch", "cluster"])
def test_missing_table(missing: str) -> None:
    """A job needs its tables."""
    broken = tables()
    del broken[missing]
    with pytest.raises(JobError, match=rf"\[{missing}\]"):
        Job.from_dict(broken)


@given(tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), nodes=st.integers(1, 64))
def test_round_trip(tp: int, pp: int, nodes: int) -> None:
    """A job equals what is read from its own tables."""
    changed = tables(parallel={"tp": tp, "pp": pp}, cluster={"nodes": 2 * nodes}, batch={"global_batch": 16 * nodes})
    job = Job.from_dict(changed)
    again = Job.from_dict(json.loads(job.to_json()))
    assert job == again and hash(job) == hash(again)


def test_files(tmp_path: Path) -> None:
    """TOML and JSON hold the same job; a broken file is one error that names it."""
    as_json = tmp_path / "job.json"
    as_json.write_text(json.dumps(tables()))
    as_toml = tmp_path / "job.toml"
    lines = []
    for section, table in tables().items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    as_toml.write_text("\n".join(lines))
    assert Job.from_file(as_json) == Job.from_file(as_toml)
    as_toml.write_text("[model")
    for path in (as_toml, tmp_path / "absent.toml", tmp_path / "job.yaml", tmp_path):
        with pytest.raises(JobError, match=path.name):
            Job.from_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"layers": NaN}}', "a number must be finite, got NaN"),
        ('{"model": {}, "model": {}}', "got 'model' twice"),
        ('{"model": {"name": "\\ud800"}}', "whole characters"),
        ("[" * 10**5, "nested thousands deep"),
    ],
)
def test_json_is_strict(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(JobError, match=f"job.json is not valid JSON: .*{message}"):
        Job.from_file(path)


def test_catalogue_and_custom_fabric() -> None:
    """A catalogue model needs no sizes, and a fabric may be a table in the job."""
    links = {"bandwidth_gbytes_per_s": 10.0, "latency_us": 3.0}
    job = Job.from_dict(
        {
            "model": {"name": "llama3-8b"},
            "batch": {"micro_batch": 1, "global_batch": 8},
            "cluster": {"hardware": "x", "devices_per_node": 8, "fabric": {"intra_node": links, "inter_node": links}},
        }
    )
    assert job.model.kv_heads == 8 and job.model.gated_mlp
    assert job.fabric.inter_node.bandwidth_bytes_per_s == 10e9


def test_a_framework_fills_what_a_job_leaves_open(tmp_path: Path) -> None:
    """What is stated goes before; the vocabulary is padded; what is read back is the same job."""
    job = Job.from_dict({"framework": "Megatron-LM", **tables(model={"vocab": 1000}, parallel={"bucket_mbytes": 7.0})})
    m, p = job.model, job.parallel
    assert (job.framework, m.vocab, m.dropout, m.fused_attention) == ("Megatron-LM", 1024, 0.1, False)
    assert (p.bucket_mbytes, p.overlap_grad_reduce, p.scatter_p2p) == (7.0, False, True)
    assert Job.from_dict(json.loads(job.to_json())) == job
    (tmp_path / "job.json").write_text(job.to_json())
    assert Job.from_file(tmp_path / "job.json", "InternEvo").framework == "InternEvo"
    assert Job.from_dict(tables()).framework == "" and not job.warnings


@pytest.mark.parametrize("framework", [7, ["nemo"], {"name": "nemo"}, "ne\nmo"])
def test_a_framework_is_a_name(framework: Any) -> None:
    with pytest.raises(JobError, match="framework must be a"):
        Job.from_dict({"framework": framework, **tables()})


def test_an_unknown_framework_is_refused() -> None:
    """With the names that are known and the nearest one, beside all other mistakes of the job."""
    with pytest.raises(JobError, match=r"framework must be one of .*nemo.*generic, or a .json or .*, got 'my trainer'"):
        Job.from_dict({"framework": "my trainer", **tables()})
    with pytest.raises(JobError, match=r"got 'torchtitam' \(did you mean 'torchtitan'\?\).*vocab"):
        Job.from_dict({"framework": "torchtitam", **tables(model={"vocab": "x"})})
    with pytest.raises(JobError, match="framework must be one of"):
        replace(Job.from_dict(tables()), framework="my trainer")
    assert Job.from_dict({"framework": "generic", **tables()}).framework == "generic"


@pytest.mark.parametrize("changes", [{"parallel": {"tp": "2"}}, {"model": {"vocab": True}}, {"parallel": {"pp": -1}}])
def test_a_framework_hides_no_mistake(changes: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="must be"):
        Job.from_dict({"framework": "megatron-deepspeed", **tables(**changes)})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"model": {"name": "gpt3-175B"}}, r"model.name must be one of .*\(did you mean 'gpt3-175b'\?\)"),
        ({"model": {}}, "model.name must be one of .* or come with sizes, got ''"),
        ({"paralel": {"tp": 2}}, r"unknown table \[paralel\] \(did you mean 'parallel'\?\)"),
    ],
)
def test_mistakes_name_what_was_meant(tables: dict[str, Any], words: str) -> None:
    """Names that are nearly right, and a model without a name or sizes."""
    with pytest.raises(JobError, match=words):
        Job.from_dict(tables)


def test_a_batch_that_the_ranks_share_is_shared_on_other_devices_too() -> None:
    """The tables of a job say no more than the job was told; a micro-batch that was stated stays."""
    job = Job.from_file(Path(__file__).parents[3] / "examples" / "dlrm-dcnv2-64h100.toml")
    assert Job.from_dict(job.to_dict()) == job and Job.from_dict(job.to_dict()).shares_batch
    more = Job.of(job, {"cluster.nodes": 2 * job.cluster.nodes, "parallel.dp": 2 * job.parallel.dp})
    assert 2 * more.batch.micro_batch == job.batch.micro_batch
    stated = Job.of(job, {"batch.micro_batch": 16})
    assert Job.from_dict(stated.to_dict()).batch.micro_batch == 16
