"""Data edges of a job's programs are those that execution traces of the same job tell."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stepsight.dataset.graph.program import PHASES, WHY_NUMBER, Dependency, Program
from stepsight.dataset.graph.rank_trace import TracedSegment
from stepsight.dataset.runs import run_folder
from stepsight.dataset.trace_graphs.call_segments import UnmeasuredRun
from stepsight.simulator.blocks.step import Flow
from stepsight.simulator.programs.data_flow import ENTERS, DataFlow
from stepsight.simulator.programs.lower import lower
from stepsight.simulator.replay.job_programs import unmeasured_job
from tests.simulator.programs.recorded_programs import ALL, HARDWARE, job

RUNS = Path(__file__).parents[3] / "examples" / "collection" / "runs"
Edges = set[tuple[int, int]]


@cache
def traced_and_asked(name: str) -> tuple[list[TracedSegment], Program, UnmeasuredRun]:
    """Traced segments of the run that is named so, its first rank's step, and its job's segments and steps."""
    (folder,) = RUNS.glob(f"{name}*")
    trace = run_folder.read_run(folder, executions=True)
    return trace.segments(), run_folder.traced_run(trace).graphs[0], unmeasured_job(trace.manifest.job)


def data_edges(program: Program) -> Edges:
    return {(before, after) for before, after, why in program.edges if why is Dependency.DATA}


@pytest.mark.parametrize(
    ("name", "most_missing"),
    [  # of all: what a trace only seems to tell, as buffers are used again
        ("gpt-4L-256h-tp1-pp1", 0),
        ("gpt-2L-384h-tp1-pp1-dp1-mb2x2", 0),  # sums of two micro-batches
        ("gpt-4L-256h-tp1-pp2", 0),
        ("llama-2L-256h", 1),
        ("gpt-3L-224h", 2),  # DDP
        ("gpt-3L-256h", 1),  # FSDP2
        ("gpt-4L-384h-tp2", 5),  # the statistics of the loss
        ("gpt-3L-320h-tp2sp", 5),
    ],
)
def test_a_job_has_the_data_edges_of_its_trace(name: str, most_missing: int) -> None:
    traced, _, asked = traced_and_asked(name)
    works = {(s.label, tuple(node.work for node in s.program.nodes)): s.program for s in asked.segments}
    compared = set()
    for segment in traced:
        key = segment.label, tuple(node.work for node in segment.program.nodes)
        found, told = data_edges(works[key]), data_edges(segment.program)
        assert len(told - found) <= most_missing and len(found - told) <= (most_missing > 2)
        compared.add(segment.label)
    assert compared == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize(("name", "least"), [("gpt-4L-256h-tp1-pp1", 0.99), ("gpt-3L-224h", 0.98), ("llama-3L", 0.94)])
def test_a_step_keeps_activations_and_gradients_as_its_trace(name: str, least: float) -> None:
    """Edges from forward to backward and to the optimizer, by phases and kinds."""
    _, graph, asked = traced_and_asked(name)
    counts = []
    for program in (graph, asked.graphs[0]):
        ends = [program.edge_columns[end] for end in ("source", "target")]
        data = program.edge_columns["why"] == WHY_NUMBER[Dependency.DATA]
        step = program.columns["step"]
        kept = data & ((step[ends[1]] == 0) | (step.max() < 0))  # a job's nodes have no number of a step
        pairs = np.unique(np.stack([end[kept] for end in ends]), axis=1).T.tolist()
        phases = program.columns["phase"]
        told = [tuple((PHASES[phases[end]], program.kind_of(end)) for end in pair) for pair in pairs]
        counts.append({each: told.count(each) for each in told})
    equal = sum(min(count, counts[1].get(kinds, 0)) for kinds, count in counts[0].items())
    assert equal >= least * max(sum(count.values()) for count in counts)


@pytest.mark.parametrize("name", sorted(ALL))
def test_data_edges_say_nothing_new_about_the_order(name: str) -> None:
    """A node is issued after what it reads, and waits for it: times do not change."""
    asked = job({key: value for key, value in ALL[name].items() if key not in ("engine", "kind")})
    for segment in lower(asked, HARDWARE["h100-sxm-80gb"]).segments:
        program, graph = segment.program, segment.graph
        data = data_edges(program)
        assert data or len(program) < 3 or segment.label == "weight"
        reached: list[set[int]] = []
        for node in range(len(program)):
            before = graph.before[graph.pointer[node] : graph.pointer[node + 1]].tolist()
            reached.append({node}.union(*(reached[each] for each in before)))
        assert all(before in reached[after] for before, after in data)


def test_branches_of_a_block_read_what_forked() -> None:
    latent = ALL["latent queries"] | {"recompute": "none", "recompute_modules": ()}
    (program, *_) = (s.program for s in lower(job(latent), HARDWARE["h100-sxm-80gb"]).segments if s.label == "forward")
    names = [node.name.removeprefix("layer1.") for node in program.nodes]
    read = {names[after]: set() for _, after in data_edges(program)}
    for before, after in data_edges(program):
        read[names[after]].add(names[before])
    assert read["kv_down"] == read["q_down"] == {"norm1"}
    assert read["q_norm"] == {"q_down"} and read["kv_norm"] == {"kv_down"}
    assert {"q_up", "kv_up"} <= read["rope"]


def test_marks_keep_swap_and_join() -> None:
    flow = DataFlow()
    assert flow.reads(0, "a", (Flow.KEEP,)) == [ENTERS]
    assert flow.reads(1, "b", ()) == [0]
    assert flow.reads(2, "c", (Flow.SWAP,)) == [ENTERS]  # the branch that was kept
    assert flow.reads(3, "d", (Flow.JOIN,)) == [2, 1]
    assert flow.reads(4, "e", (Flow.ASIDE,)) == [] and flow.newest == [3]
    assert flow.reads(5, "f", (Flow.RUN_AGAIN,)) == [] and flow.reads(6, "g", (Flow.RAN_AGAIN,)) == [3]


def test_reads_do_not_double_with_every_layer() -> None:
    """A pass of weight gradients alone hands nothing on: all its branches hold what enters the segment."""
    flow, marks = DataFlow(), (Flow.JOIN, Flow.KEEP, Flow.BEGIN_BACKWARD, Flow.GRADIENT)
    for node in range(64):
        assert flow.reads(node, "layer.out", marks) == [ENTERS]
        flow.follow((Flow.KEEP,))
    deep = next(value for name, value in ALL.items() if "zb" in str(value.get("schedule", "")))
    for segment in lower(job({**deep, "layers": 48}), HARDWARE["h100-sxm-80gb"]).segments:
        assert len(data_edges(segment.program)) == sum(why is Dependency.DATA for *_, why in segment.program.edges)
        assert len(data_edges(segment.program)) < 10 * len(segment.program)
