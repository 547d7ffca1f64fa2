"""Traces of other people's jobs: imported whole, every kernel in its place, replayed as measured."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from stepsight.dataset.traces.import_traces import import_ranks, summary
from stepsight.simulator.replay.replay import replay

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("STEPSIGHT_DATA", ROOT.parent / "shared" / "data")) / "traces"


def public(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not under {DATA} (set STEPSIGHT_DATA)")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
        "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
        "hta/critical_path/simple_add/benchmark_result_493459_1694039959_trace.json.gz",
        "hta/critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz",
        "hta/nccl_parser_config/nccl_data.json.gz",
        "param/resnet_kineto.json.gz",
        "tracelens/h100/Falconsai_nsfw_image_detection__1016002.json.gz",
        "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
        "tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz",
    ],
)
def test_a_trace_of_one_rank(name: str) -> None:
    found = import_ranks([public(name)])
    told, replayed = summary(found), replay(found.graphs)
    assert told["recognised_percent"] >= 95
    assert abs(replayed.error_percent) <= 2 and replayed.unexplained_percent <= 5
    assert all(abs(stream.error_percent) <= 3 for stream in replayed.streams)


def test_eight_ranks_together(tmp_path: Path) -> None:
    for name in ("dlrm_kineto", "dlrm_pytorch_et"):
        with tarfile.open(public(f"param/{name}.tar.gz")) as archive:
            archive.extractall(tmp_path, filter="data")
    found = import_ranks([tmp_path / "dlrm_kineto"], [tmp_path / "dlrm_pytorch_et"])
    told, replayed = summary(found), replay(found.graphs)
    assert told["ranks"] == 8 and told["dependencies"]["rendezvous"] == 7 * 8
    assert min(told["dependencies"].values()) > 0 and told["recognised_percent"] >= 95
    assert abs(replayed.error_percent) <= 2
    assert all(abs(stream.error_percent) <= 3 for stream in replayed.streams)


def test_a_trimmed_trace_says_what_it_lacks() -> None:
    folder = public("hta/trace_filter")
    found = import_ranks([folder])
    assert any("kernels are missing" in warning for warning in found.warnings)
    assert any("ranks are missing: 126 of 128" in warning for warning in found.warnings)
    assert replay(found.graphs).unrecorded_percent > 5
