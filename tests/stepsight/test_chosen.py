"""The strategy that a search chose, written for a framework that may not express it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepsight.cli import app
from stepsight.cli.ask import BestStrategyFile
from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.configs.edits import edit_config
from stepsight.dataset.configs.formats import read_configs
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.search import MOST_LEGAL, best_expressed, expresses
from stepsight.experiments.search.search_report import write_best
from stepsight.experiments.search.settings import Space
from stepsight.experiments.search.strategies import strategies
from stepsight.training.prediction.prediction import predict
from tests.dataset.configs import test_published as published

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt3-175b-1024.toml"
SMALL = Space(max_tp=8, micro_batches=(1,), cp=(1,), zero_stages=(1,), recompute=("none",), schedules=("zb-h1",))


def result(*schedules: str) -> SearchResult:
    """Strategies that differ in their schedule, each 2 % slower than the one before."""
    job = Job.from_file(EXAMPLE)
    jobs = [replace(job, parallel=replace(job.parallel, schedule=name)) for name in schedules]
    return SearchResult([Choice(of, 1.0, 2.0, (1.02**n, 1.0, 2.0), predict) for n, of in enumerate(jobs)])


def written(found: SearchResult, out: Path, to: str, read: tuple[list[Path], Job] | None = None) -> dict[str, Any]:
    """What is told; ``read``: the files that are asked about, else one of another format."""
    return write_best(found, out, to, read or ([EXAMPLE], found.best.job), {"predictor": "roofline", "space": SMALL})


def text_of(*asked: Any) -> str:
    return str(written(*asked)["text"]).removeprefix("\n")


def test_what_a_framework_expresses_is_written(tmp_path: Path) -> None:
    """Megatron has no zb-h1: the next strategy is written, and what that costs is said."""
    text = text_of(result("zb-h1", "1f1b"), tmp_path / "train.sh", "megatron-script")
    assert (
        "pp16-1f1b" in text
        and "does not express the best strategy (parallel.schedule = zb-h1)" in text
        and "(+2.0 % iteration time)" in text
    )
    assert "of the legal strategies that it expresses" in text
    assert "pp16-1f1b" in (tmp_path / "train.sh").read_text()
    assert text_of(result("1f1b"), tmp_path / "train.sh", "megatron-script").startswith("wrote the best strategy")


def test_a_strategy_that_was_not_evaluated_is_found(tmp_path: Path) -> None:
    """A search evaluates only what could be the best of all; the best that a format expresses may be another."""
    space = replace(SMALL, schedules=("zb-h1", "1f1b"))
    found, all_legal = best_expressed(result("zb-h1"), "megatron-script", "roofline", space)
    assert all_legal and found is not None and found.fits and found.seconds is not None
    assert expresses("megatron-script", found.job) and found.job.parallel.schedule == "1f1b"
    slower = [job for job in strategies(result("zb-h1").best.job, space) if expresses("megatron-script", job)]
    times = [predict(job, "roofline") for job in slower]
    least = min(each.iteration_time_s for each in times if each.memory.fits)
    assert found.seconds[0] == pytest.approx(least)


def test_a_large_space_is_not_looked_through() -> None:
    """The strategies evaluated are all that is considered then."""
    found = replace(result("zb-h1"), legal=MOST_LEGAL + 1)
    assert best_expressed(found, "megatron-script") == (None, False)


def test_where_nothing_is_expressed_the_answer_warns(tmp_path: Path) -> None:
    """The file lacks what is listed; a job file expresses all."""
    text = text_of(result("zb-h1"), tmp_path / "train.sh", "megatron-script")
    assert text.startswith("warning: ") and "is not the best strategy, only what megatron-script expresses" in text
    assert "not expressed by megatron-script: parallel.schedule" in text
    assert (
        text_of(result("zb-h1", "1f1b"), tmp_path / "best.toml", "")
        == f"wrote the best strategy to {tmp_path}/best.toml"
    )
    assert Job.from_file(tmp_path / "best.toml").parallel.schedule == "zb-h1"


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    """A table of prices, or a job file with comments, is kept; the result of an earlier search is replaced."""
    out = tmp_path / "best.toml"
    text_of(result("1f1b"), out, "")
    BestStrategyFile(out=out).check([EXAMPLE])
    for text in ("[price_per_device_hour]\n", "# my notes\n[model]\n"):
        out.write_text(text)
        with pytest.raises(StepsightError, match="refuses to overwrite"):
            BestStrategyFile(out=out).check([EXAMPLE])


def test_the_users_own_file_is_changed(tmp_path: Path) -> None:
    """A script keeps its comments and other options: only what the strategy changes is another."""
    script = (
        "#!/bin/bash\nTP=8  # of a node\nARGS=(--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --bf16\n"
        "  --seq-length 2048 --tensor-model-parallel-size $TP --micro-batch-size 1 --global-batch-size 1536\n"
        "  --pipeline-model-parallel-size=16 --sequence-parallel --lr 6e-5)\n"
        "torchrun --nproc_per_node 8 --nnodes 128 pretrain_gpt.py ${ARGS[@]}\n"
    )
    own, out = tmp_path / "own.sh", tmp_path / "train.sh"
    own.write_text(script)
    job = read_configs([own]).job
    best = replace(job, parallel=replace(job.parallel, tp=4, pp=8, dp=32, zero_stage=1))
    found = SearchResult([Choice(best, 1.0, 2.0, (1.0, 1.0, 2.0), predict)])
    told = written(found, out, "megatron-script", ([own], job))
    text = told["text"].removeprefix("\n")
    changed = script.replace("TP=8", "TP=4").replace("size=16", "size=8")
    assert out.read_text() == changed.replace("--micro-batch", "--use-distributed-optimizer --micro-batch")
    assert text.startswith("wrote the best strategy") and "-TP=8  # of a node\n+TP=4  # of a node\n" in text
    assert told["out"] == str(out) and told["diff"].rstrip() in text and all(note in text for note in told["notes"])
    assert edit_config(own, job, best, "torchtitan") is None


def test_a_file_that_cannot_be_changed_is_said(tmp_path: Path) -> None:
    """What is written then lacks the file's other settings.  With the model's file beside it, in any order, it can."""
    (tmp_path / "config.json").write_text(json.dumps(published.LLAMA))
    (own := tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    job = read_configs([tmp_path / "config.json", own]).job
    found = SearchResult([Choice(job, 1.0, 2.0, (1.0, 1.0, 2.0), predict)])
    told = written(found, tmp_path / "new.json", "deepspeed", ([own], job))
    assert told["diff"] is None and f"warning: {own} could not be changed in place" in told["text"]
    assert any("could not be changed in place" in note for note in told["notes"])
    other = replace(job, parallel=replace(job.parallel, zero_stage=1))
    found = SearchResult([Choice(other, 1.0, 2.0, (1.0, 1.0, 2.0), predict)])
    told = written(found, tmp_path / "new.json", "deepspeed", ([tmp_path / "config.json", own], job))
    assert told["diff"] and '"stage": 1' in (tmp_path / "new.json").read_text()


def test_the_framework_that_is_written_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that states none is searched with the profile of the format's framework."""
    (own := tmp_path / "job.toml").write_text(EXAMPLE.read_text().replace("framework =", "# framework ="))
    found = []
    for more in (["--framework", "megatron-core"], ["--to", "megatron-script", "--out", str(tmp_path / "a.sh")], []):
        app(["search", str(own), "--trials", "3", "-p", "roofline", "--json", *more], standalone_mode=False)
        found.append(json.loads(capsys.readouterr().out)["own"]["iteration_time_s"])
    assert found[0] == found[1] != found[2]


def test_tables_that_fit_by_another_rule_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table is larger than a device, so that no job has it whole."""
    (own := tmp_path / "job.toml").write_text(
        '[model]\nfamily = "dlrm"\ntables = [{ rows = 400000000, dim = 128 }, { rows = 1000, dim = 128 }]\n'
        '[sharding]\nrule = "table-wise"\n[batch]\nmicro_batch = 1024\nglobal_batch = 8192\nprecision = "fp16"\n'
        '[cluster]\nhardware = "h100-sxm-80gb"\nnodes = 1\ndevices_per_node = 8\n'
    )
    app(["search", str(own), "--trials", "50", "-p", "roofline", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["fits"] and "the job's own sharding is not possible" in told["notes"][0]


def test_a_tight_strategy_tells_what_it_needs() -> None:
    """Its peak is the device's capacity, which the allocator's slack fills."""
    job = Job.from_file(EXAMPLE.with_name("llama3-70b-fsdp-512.toml"))
    degrees: dict[str, Any] = {
        "tp": 4,
        "cp": 2,
        "pp": 2,
        "dp": 32,
        "zero_stage": 1,
        "sequence_parallel": True,
        "recompute": "none",
    }
    full = replace(job, parallel=replace(job.parallel, virtual_stages=4, schedule="1f1b", dp_shard=0, **degrees))
    for own, is_tight in ((job, False), (full, True)):
        choice = Choice.of(predict(own, "roofline"), predict)
        assert choice.tight == (choice.needed_bytes < choice.peak_bytes - 1e6) == is_tight
