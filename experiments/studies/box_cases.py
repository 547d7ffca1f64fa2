"""Runs in boxes: every strategy of three models on 4, 8 and 16 ranks, and variations of other settings.

A case is called ``box/<model>/<strategy>``: ``2M2P4D`` is tensor 2, pipeline 2, data 4; then follows what differs from
1F1B, DDP with buckets of 25 MB, and ``nodes x 1 @ 100 Mbit/s``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.box_spec import HARDWARE, Box, read_box

MOST_TRAINING_RANKS = 4
RATE = 100  # Mbit/s
SIZES = (4, 8, 16)
_SHARED = {"hidden": 256, "heads": 16, "vocab": 2048}
MODELS = {
    "bert": ModelSpec(family="bert", layers=4, seq_len=128, **_SHARED),  # type: ignore[arg-type]
    "gpt2": ModelSpec(family="gpt", layers=8, seq_len=64, **_SHARED),  # type: ignore[arg-type]
    "t5": ModelSpec(family="t5", layers=2, seq_len=64, encoder_layers=2, encoder_seq_len=128, **_SHARED),  # type: ignore[arg-type]
}
SEARCHED = ModelSpec(family="gpt", layers=48, seq_len=64, **_SHARED)  # type: ignore[arg-type]
SEARCHED_BATCH = 16


@dataclass(frozen=True)
class BoxCase:
    """One run."""

    name: str  # box/<model>/<strategy>
    box: Box
    job: Job

    @property
    def judges(self) -> bool:
        """Whether it is larger than the training runs."""
        return self.job.cluster.num_devices > MOST_TRAINING_RANKS


def strategy_name(parallel: ParallelSpec) -> str:
    """``2M2P4D``, and a schedule that is not 1F1B."""
    words = [f"{parallel.tp}M{parallel.pp}P{parallel.dp}D"]
    if parallel.pp > 1 and parallel.schedule != "1f1b":
        words.append(parallel.schedule)
    if parallel.virtual_stages > 1:
        words.append(f"v{parallel.virtual_stages}")
    if parallel.zero_stage:
        words.append("fsdp")
    if parallel.dp > 1 and not parallel.zero_stage and parallel.bucket_mbytes != ParallelSpec().bucket_mbytes:
        words.append(f"b{parallel.bucket_mbytes:g}")
    return "-".join(words)


def micro_batches(pp: int) -> int:
    """Micro-batches of each replica: enough to fill the pipeline, at least 4 and at most 16."""
    return min(16, max(4, 2 * pp))


def case(model: str, spec: ModelSpec, box: Box, parallel: ParallelSpec, batches: int = 0, suffix: str = "") -> BoxCase:
    """A strategy of a model on a box; ``batches``: micro-batches of each replica, 0: as the pipeline needs."""
    parallel = replace(parallel, dp=box.num_ranks // (parallel.tp * parallel.pp))
    usual = box.ranks_per_node == 1 and set(box.mbits_per_s) == {RATE}
    words = [strategy_name(parallel), f"m{batches}" if batches else "", "" if usual else box.name, suffix]
    batches = batches or micro_batches(parallel.pp)
    job = Job(
        model=spec,
        parallel=parallel,
        batch=BatchSpec(micro_batch=1, global_batch=batches * parallel.dp, precision="fp32"),
        cluster=ClusterSpec(hardware=HARDWARE, nodes=box.nodes, devices_per_node=box.ranks_per_node, fabric=box.fabric),
    )
    return BoxCase(f"box/{model}/{'-'.join(filter(None, words))}", box, box.holds(job))


def parallel_specs(spec: ModelSpec, ranks: int) -> Iterator[ParallelSpec]:
    """Every tensor, pipeline and data degree with the product ``ranks`` that is legal for the model."""
    tp = 1
    while tp <= ranks:
        pp = 1
        while tp * pp <= ranks:
            if pp <= spec.total_layers and spec.heads % tp == 0:
                yield ParallelSpec(tp=tp, pp=pp, dp=ranks // (tp * pp))
            pp *= 2
        tp *= 2


def model_cases(model: str, spec: ModelSpec) -> list[BoxCase]:
    """All strategies of a model on nodes of one rank."""
    return [case(model, spec, _flat(ranks), parallel) for ranks in SIZES for parallel in parallel_specs(spec, ranks)]


def runtime_cases() -> list[BoxCase]:
    """Schedules, micro-batch counts, gradient buckets, FSDP2."""
    gpt, bert, base = MODELS["gpt2"], MODELS["bert"], ParallelSpec
    cases = [
        case("gpt2", gpt, _flat(8), base(pp=8), batches=10),
        case("gpt2", gpt, _flat(8), base(pp=4), batches=5),
        case("gpt2", gpt, _flat(8), base(pp=8, schedule="zb-h1"), batches=8),
        case("gpt2", gpt, _flat(8), base(pp=4, virtual_stages=2, schedule="interleaved-zb"), batches=8),
        case("gpt2", replace(gpt, layers=16), _flat(16), base(pp=16), suffix="16-layers"),
        case("bert", bert, _flat(8), base(zero_stage=3)),
    ]
    for ranks in (8, 16):
        cases.append(case("gpt2", gpt, _flat(ranks), base(pp=ranks // 2, schedule="gpipe")))
        cases.append(case("gpt2", gpt, _flat(ranks), base(pp=4, virtual_stages=2)))
        cases.append(case("bert", bert, _flat(ranks), base(bucket_mbytes=2.0)))
        cases.append(case("bert", bert, _flat(ranks), base(tp=2, bucket_mbytes=6.0)))
    return cases


def other_boxes() -> list[BoxCase]:
    """Nodes of several ranks, and faster links, so that communication matters less or not at all."""
    gpt, bert, base = MODELS["gpt2"], MODELS["bert"], ParallelSpec
    cases = []
    for text in ("8x2@100mbit", "4x4@200mbit"):
        for p in (base(tp=2), base(tp=2, pp=4), base(tp=4, pp=4), base(pp=8)):
            cases.append(case("gpt2", gpt, read_box(text), p))
    for text in ("8x1@200mbit", "8x1@800mbit"):
        box = read_box(text)
        cases += [case("bert", bert, box, p) for p in (base(), base(tp=8), base(zero_stage=3), base(tp=2, pp=4))]
    return cases


def what_if_cases() -> list[BoxCase]:
    """One slow link, and one slow rank."""
    spec, link = MODELS["bert"], Box(8, 1, (RATE, RATE, RATE, RATE / 4, RATE, RATE, RATE, RATE))
    cases = [case("bert", spec, link, p) for p in (ParallelSpec(dp=8), ParallelSpec(tp=2, pp=4), ParallelSpec(pp=4))]
    for p in (ParallelSpec(dp=8), ParallelSpec(pp=4), ParallelSpec(tp=2, pp=2)):
        plain = case("bert", spec, _flat(8), p, suffix="slow-rank")
        cluster = replace(plain.job.cluster, stragglers=(Straggler(rank=3, slowdown=1.5),))
        cases.append(replace(plain, job=replace(plain.job, cluster=cluster)))
    return cases


def small_cases() -> list[BoxCase]:
    """More training runs: FSDP2, pipelines of both runtimes, two ranks on a node."""
    gpt, bert, pair = MODELS["gpt2"], MODELS["bert"], read_box("2x2@100mbit")
    return [
        case("bert", bert, _flat(4), ParallelSpec(dp=4, zero_stage=3)),
        case("bert", bert, _flat(4), ParallelSpec(dp=4, bucket_mbytes=2.0)),
        case("gpt2", gpt, _flat(4), ParallelSpec(pp=4, schedule="gpipe")),
        case("gpt2", gpt, _flat(4), ParallelSpec(pp=4, virtual_stages=2)),
        case("gpt2", gpt, pair, ParallelSpec(tp=2, dp=2)),
        case("gpt2", gpt, pair, ParallelSpec(tp=2, pp=2)),
    ]


def box_cases() -> list[BoxCase]:
    """Every case, the smallest ranks first."""
    cases = [found for model, spec in MODELS.items() for found in model_cases(model, spec)]
    cases += small_cases() + runtime_cases() + other_boxes() + what_if_cases()
    by_name = {found.name: found for found in cases}
    return sorted(by_name.values(), key=lambda found: (found.job.cluster.num_devices, found.box.name, found.name))


def _flat(ranks: int) -> Box:
    return Box(ranks, 1, (float(RATE),) * ranks)


def profiled_boxes() -> list[Box]:
    """Boxes in which collectives are measured alone."""
    return [read_box(text) for text in ("2x1@100mbit", "3x1@100mbit", "4x1@100mbit", "2x2@100mbit", "4x1@400mbit")]


SIZES_PROFILED = (64, 1024, 16384, 65536, 131072, 2**19, 2**21)  # bytes
MESSAGES_PROFILED = (256, 16384, 65536, 131072, 262144, 2**20)


def collectives_of(box: Box) -> list[Collective]:
    """Measurements of a box's collectives."""
    ranks, near = box.num_ranks, box.ranks_per_node
    layouts = sorted({(ranks, near), (box.nodes, 1), (near, near)})
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    found = [
        Collective(kind, size, of, here) for of, here in layouts if of > 1 for kind in kinds for size in SIZES_PROFILED
    ]
    found += [Collective("send_recv", size, 2, 1) for size in MESSAGES_PROFILED]
    if near > 1:
        found += [Collective("send_recv", size, 2, 2) for size in MESSAGES_PROFILED]
    return found


def ops_profiled() -> list[Op]:
    """The work that a box's ranks really compute: copies and sums of gradients."""
    return [Op(kind, (2**power,), "fp32") for kind in ("add", "copy", "elementwise") for power in (10, 16, 18, 20, 21)]


SEARCHED_RANKS = 16
MOST_TENSOR_PARALLEL = 4  # collectives of more ranks use too much of a small machine's cores


def candidates() -> list[BoxCase]:
    """Every strategy with the same global batch: tensor parallel up to four, 1F1B plain and interleaved."""
    box = read_box(f"{SEARCHED_RANKS}x1@{RATE}mbit")
    found = []
    for parallel in parallel_specs(SEARCHED, SEARCHED_RANKS):
        for chunks in (1, 2, 3):
            parts = parallel.pp * chunks
            batches = SEARCHED_BATCH // parallel.dp
            if (parallel.pp == 1 and chunks > 1) or SEARCHED.layers % parts or parallel.tp > MOST_TENSOR_PARALLEL:
                continue
            if (parallel.pp > 1 and batches < parallel.pp) or (chunks > 1 and batches % parallel.pp):
                continue  # the runtime needs at least as many micro-batches as stages
            found.append(case("searched", SEARCHED, box, replace(parallel, virtual_stages=chunks), batches))
    return found
