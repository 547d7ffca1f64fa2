"""Public traces of other people's runs: read whole, with what their makers say of them."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from stepsight.dataset.graph.program import Dependency
from stepsight.dataset.graph.rank_trace import RankTrace
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.traces.read_rank import read_kineto
from stepsight.testing import TraceReaderContract

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("STEPSIGHT_DATA", ROOT.parent / "shared" / "data")) / "traces"


def public(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(
            f"the public trace {name} is not under {DATA} (set STEPSIGHT_DATA to the folder that holds traces/)"
        )
    return path


class PublicTrace(TraceReaderContract):
    name: str
    on_host = False

    def sample(self, folder: Path) -> Path:
        copy = folder / Path(self.name).name
        copy.write_bytes(public(self.name).read_bytes())
        return copy

    def read(self, path: Path) -> RankTrace:
        return read_kineto(path)


class TestAlexNetOnA100(PublicTrace):
    name = "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz"


class TestBertOnH100(PublicTrace):
    name = "tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz"


class TestToyOnMI250(PublicTrace):
    name = "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz"


class TestSampledRank(PublicTrace):
    name = "hta/trace_filter/sampled_rank-0.json.gz"


def test_nccl_records_give_collectives() -> None:
    """Rank 0 of 2, A100, DDP: all-reduces and broadcasts of the default group over NVLink, on a stream of their own."""
    trace = read_kineto(public("hta/nccl_parser_config/nccl_data.json.gz"))
    collectives = [node for node in trace.program.nodes if isinstance(node.work, Collective)]
    assert {node.work.kind for node in collectives} == {"all_reduce", "broadcast"}  # type: ignore[union-attr]
    assert {node.work.group_size for node in collectives} == {2}  # type: ignore[union-attr]
    assert {node.stream for node in collectives} == {"default_pg"}
    assert Collective("all_reduce", 4 * 6637568, 2, 2) in {node.work for node in collectives}
    assert len(trace.spans) == 3


def test_ops_of_bert_are_known() -> None:
    """Nearly all device time of a transformer on an H100 is in known kinds, products first."""
    trace = read_kineto(public("tracelens/h100/gaunernst_bert-small-uncased__1016001.json.gz"))
    assert trace.unclassified_s < 0.05 * trace.duration_s.sum()
    kinds = Counter(node.work.kind for node in trace.program.nodes)
    assert kinds["attention"] == 4 and kinds["linear"] >= 24
    assert {node.work.dtype for node in trace.program.nodes if isinstance(node.work, Op)} >= {"bf16"}


def test_waits_between_streams_are_synchronisation() -> None:
    trace = read_kineto(public("hta/critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz"))
    assert len(trace.program.streams) == 3
    assert {why for _, _, why in trace.program.edges} == {Dependency.SYNCHRONISATION}


def test_the_ranks_of_a_job_meet(tmp_path: Path) -> None:
    """Eight ranks of one DLRM step: every rank sees the same collectives in the same order."""
    with tarfile.open(public("param/dlrm_kineto.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    traces = [read_kineto(path) for path in sorted(tmp_path.rglob("*.json"))]
    assert len(traces) >= 6
    sequences = [
        [node.work.kind for node in trace.program.nodes if isinstance(node.work, Collective)] for trace in traces
    ]
    assert sequences[0] and all(sequence == sequences[0] for sequence in sequences)
