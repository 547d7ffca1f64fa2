"""``stepsight job``, and verbs that take configurations of training frameworks."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import stepsight
from stepsight.cli import app
from stepsight.dataset.job.job import Job

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """NODES=2
torchrun --nnodes $NODES --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 \\
    --seq-length 128 --vocab-size 1000 --micro-batch-size 2 --global-batch-size 64 --bf16 --lr 1e-4 \\
    --tensor-model-parallel-size 2
"""
run = CliRunner()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return path


def test_a_configuration_becomes_a_job_file(script: Path) -> None:
    out = script.with_name("job.toml")
    done = run.invoke(app, ["job", str(script), "--hardware", "a100-sxm-80gb", "--out", str(out), "--json"])
    value = json.loads(done.stdout)
    assert value["mapped"]["model.layers"] == 4 and value["assumed"]["parallel.recompute"] == "none"
    assert "--lr 1e-4" in value["ignored"]
    job = Job.from_file(out)
    assert json.loads(job.to_json()) == value["job"] and job.parallel.dp == 8
    assert tomllib.loads(out.read_text())["framework"] == "megatron-core"


def test_a_job_becomes_a_configuration_and_comes_back(script: Path) -> None:
    first, second = script.with_name("job.toml"), script.with_name("again.sh")
    assert run.invoke(app, ["job", str(script), "--out", str(first)]).exit_code == 0
    done = run.invoke(app, ["job", str(first), "--to", "megatron-script", "--out", str(second), "--json"])
    assert json.loads(done.stdout)["ignored"] == []
    assert stepsight.read_configs([second]).job.to_dict() == Job.from_file(first).to_dict()
    own = "torchrun mine.py"
    second.write_text(own)
    options = ["job", str(first), "--to", "megatron-script", "--out", str(second)]
    assert "must be a new file" in str(run.invoke(app, options).exception) and second.read_text() == own
    assert run.invoke(app, [*options, "--force"]).exit_code == 0 and second.read_text() != own


def test_what_is_given_on_the_command_line_wins(script: Path) -> None:
    options = ["--set", "model.seq_len=256", "--set", "batch.precision=fp8", "--define", "NODES=4", "--json"]
    value = json.loads(run.invoke(app, ["job", str(script), *options]).stdout)
    assert value["mapped"]["model.seq_len"] == 256 and value["job"]["parallel"]["dp"] == 16
    assert value["job"]["batch"]["precision"] == "fp8"


def test_predict_takes_a_configuration(script: Path) -> None:
    done = run.invoke(app, ["predict", str(script), "--hardware", "a100-sxm-80gb", "--json"])
    assert json.loads(done.stdout)["iteration_time_s"] > 0
    assert "read as megatron" in done.stderr


def test_predict_moves_a_job_to_other_devices(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nname = "gpt3-1.3b"\n[batch]\nmicro_batch = 1\nglobal_batch = 64\n'
        '[cluster]\nhardware = "a100-sxm-80gb"\ndevices_per_node = 8\n'
    )
    done = run.invoke(app, ["predict", str(path), "--hardware", "h100-sxm-80gb", "--nodes", "2"])
    assert "on 16 x h100-sxm-80gb" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "job.yaml"], "--out ends in .toml"),
        (["--to", "fairseq"], "must be of megatron"),
        (["--set", "model.seq_len"], "must be KEY=VALUE"),
        (["--set", "model.sequence=3"], "a key of a job"),
    ],
)
def test_mistakes(script: Path, options: list[str], words: str) -> None:
    done = run.invoke(app, ["job", str(script), *options])
    assert done.exit_code == 1 and words in str(done.exception)


def test_the_file_that_is_read_is_kept(tmp_path: Path) -> None:
    """A job file with comments is not replaced by the same job without them."""
    path = tmp_path / "job.toml"
    path.write_text((EXAMPLES / "gpt3-175b-1024.toml").read_text())
    refused = run.invoke(app, ["job", str(path), "--out", str(path)])
    assert "--out must not be a file that is read" in str(refused.exception)
    assert path.read_text() == (EXAMPLES / "gpt3-175b-1024.toml").read_text()


def test_a_search_writes_what_it_found(script: Path) -> None:
    out, again = script.with_name("best.toml"), script.with_name("best.sh")
    options = ["search", str(script), "--predictor", "roofline", "--trials", "3", "--uneven"]
    done = run.invoke(app, [*options, "--out", str(out), "--json"])
    best = json.loads(done.stdout)["best"]
    job = Job.from_file(out)
    assert (job.parallel.tp, job.parallel.pp, job.batch.micro_batch) == (best["tp"], best["pp"], best["micro_batch"])
    assert list(job.parallel.stage_layers) == best["stage_layers"]
    done = run.invoke(app, [*options, "--out", str(again), "--to", "megatron-script"])
    assert "torchrun" in again.read_text() and f" to {again}" in done.stdout
    assert ("layers per stage" in done.stdout) == bool(best["stage_layers"])
    refused = run.invoke(app, [*options, "--to", "megatron"])
    assert "needs --out" in str(refused.exception)


def test_the_step_of_a_job_is_a_program(tmp_path: Path) -> None:
    """``--program`` writes what ``predict --program`` reads, and ``dataset --job`` takes either."""
    job, step = str(EXAMPLES / "local-gpt-tp2.toml"), str(tmp_path / "step")
    done = run.invoke(app, ["job", job, "--program", step, "--json"])
    assert json.loads(done.stdout)["program"] == step
    told = json.loads(run.invoke(app, ["predict", "--program", step, "--hardware", "local-cpu", "--json"]).stdout)
    assert told["iteration_time_s"] == pytest.approx(stepsight.predict(job).simulation.iteration_time_s, rel=0.01)
    asked = ["dataset", "--job", job, "--job", step, "--out", str(tmp_path / "data"), "--json"]
    assert json.loads(run.invoke(app, asked).stdout)["runs"] == 2
    assert "--job" in str(run.invoke(app, ["dataset", "--out", str(tmp_path / "other")]).exception)


def test_files_of_one_run_are_one_job(tmp_path: Path) -> None:
    """A DeepSpeed JSON states no model: it belongs to the model's file beside it.  Keys may be set in every verb."""
    model, training = tmp_path / "config.json", tmp_path / "ds.json"
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
    model.write_text(json.dumps({"model_type": "llama", "intermediate_size": 512, **sizes}))
    training.write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    given = ["--set", "model.seq_len=128", "-p", "roofline", "--json"]
    done = run.invoke(app, ["predict", str(model), str(training), *given])
    assert "z3 mb2" in json.loads(done.stdout)["job"] and "read as huggingface and deepspeed" in done.stderr
    refused = run.invoke(app, ["predict", str(EXAMPLES / "gpt3-175b-1024.toml"), str(model), str(training), *given])
    assert "files of one run state its model once" in str(refused.exception)
    example, asked = str(EXAMPLES / "gpt3-175b-1024.toml"), ["--set", "batch.flushes=5", "-p", "roofline"]
    for verb in (["predict"], ["explain"], ["search"], ["sweep", "--vary", "batch.micro_batch=1"]):
        assert "batch.flushes must divide" in str(run.invoke(app, [*verb, example, *asked]).exception)


def test_every_verb_answers_as_json_and_takes_keys_of_jobs() -> None:
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {word for each in verb.params for word in each.opts} for name, verb in verbs.items()}
    assert [name for name, words in options.items() if "--json" not in words] == ["experiment"]  # a study's own options
    takes = ("predict", "explain", "search", "sweep", "compare", "report", "collect", "verify", "job")
    assert [name for name in takes if "--set" not in options[name]] == []


def test_an_empty_option_is_refused() -> None:
    """It would count as not given."""
    for option in ("--date", "--container", "--framework", "--hardware"):
        refused = run.invoke(app, ["predict", str(EXAMPLES / "gpt3-175b-1024.toml"), option, ""])
        assert f"{option} must not be empty, got ''" in str(refused.exception)


@pytest.mark.parametrize("words", [["--pick", "3"], ["--define", "A=1"]])
def test_what_a_file_has_not_is_not_picked(words: list[str]) -> None:
    """A job file holds one job, and no variables."""
    refused = run.invoke(app, ["job", str(EXAMPLES / "gpt3-175b-1024.toml"), *words])
    assert "is for formats megatron, dlrm" in str(refused.exception) and "leave it out" in str(refused.exception)


def _asked(*words: str) -> Job:
    done = run.invoke(app, ["job", *words, "--json"])
    assert done.exit_code == 0, done.exception
    return Job.from_dict(json.loads(done.stdout)["job"])


@pytest.mark.parametrize("nodes", ["1", "64"])
def test_nodes_fill_what_the_file_leaves_open(nodes: str) -> None:
    file = str(EXAMPLES / "dlrm-dcnv2-64h100.toml")
    job = _asked(file, "--nodes", nodes)
    assert job == _asked(file, "--set", f"cluster.nodes={nodes}")
    assert job.num_micro_batches == 1 and job.parallel.dp == 8 * int(nodes)


def test_nodes_adapt_replicas_of_the_file_but_not_those_that_are_set() -> None:
    file = str(EXAMPLES / "gpt3-175b-1024.toml")
    assert _asked(file, "--nodes", "64").parallel.dp == 4
    assert _asked(file, "--nodes", "64", "--set", "parallel.dp=4", "--set", "batch.global_batch=96").parallel.dp == 4
    done = run.invoke(app, ["job", file, "--nodes", "64", "--set", "parallel.dp=8"])
    assert done.exit_code and "must equal the number of devices" in str(done.exception)
    assert _asked(file, "--hardware", "H100").cluster.hardware == "h100-sxm-80gb"
