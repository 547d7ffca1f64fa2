"""Runs in boxes: every strategy of three models on 4, 8 and 16 ranks, and variations of other settings.

A case is called ``box/<model>/<strategy>``: ``2M2P4D`` is tensor 2, pipeline 2, data 4; then follows what differs from
1F1B, DDP with buckets of 25 MB, and ``nodes x 1 @ 100 Mbit/s``.  Two folders are kept apart: ``profile`` (event
profiles and runs of at most four ranks, which train) and ``judge`` (larger runs, which nothing is trained on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepsight.dataset.base.errors import CollectError
from stepsight.dataset.base.files import read_json
from stepsight.dataset.hardware.hardware import HARDWARE as PRESETS
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.job.specs import Straggler
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.dataset.runs.run_manifest import HARDWARE, Box, read_box
from stepsight.experiments.studies.study import cases
from stepsight.experiments.tasks.collecting import run_plan
from stepsight.training.measured.planning import SleepingLatency, box_plan

MOST_TRAINING_RANKS = 4
RATE = 100  # Mbit/s
SIZES = (4, 8, 16)
PROFILE, JUDGE = "profile", "judge"
ROUNDS = {"judge": 3, "train": 2}
COUNTS = {"steps": 1, "warmup": 1, "profile_steps": 0}
EVENT_SECONDS = 30.0
MODELS = {name: ModelSpec(**sizes) for name, sizes in cases("box")["models"].items()}


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

    @property
    def file_name(self) -> str:
        """Of the run in its collection."""
        return self.name.removeprefix("box/").replace("/", ".").replace("@", "-")

    def folder(self, out: Path) -> Path:
        """Its collection."""
        return out / (JUDGE if self.judges else PROFILE) / self.box.name.replace("@", "-")


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


def case(model: str, spec: ModelSpec, box: Box, parallel: ParallelSpec, batches: int = 0, suffix: str = "") -> BoxCase:
    """A strategy of a model on a box; ``batches``: micro-batches of each replica, 0: as fill the pipeline."""
    parallel = replace(parallel, dp=box.num_ranks // (parallel.tp * parallel.pp))
    usual = box.ranks_per_node == 1 and set(box.mbits_per_s) == {RATE}
    words = [strategy_name(parallel), f"m{batches}" if batches else "", "" if usual else box.name, suffix]
    batches = batches or min(16, max(4, 2 * parallel.pp))
    job = Job(
        model=spec,
        parallel=parallel,
        batch=BatchSpec(micro_batch=1, global_batch=batches * parallel.dp, precision="fp32"),
        cluster=ClusterSpec(hardware=HARDWARE, nodes=box.nodes, devices_per_node=box.ranks_per_node, fabric=box.fabric),
    )
    return BoxCase(f"box/{model}/{'-'.join(filter(None, words))}", box, box.holds(job))


def parallel_specs(spec: ModelSpec, ranks: int) -> Iterator[ParallelSpec]:
    """Every tensor, pipeline and data degree with the product ``ranks`` that is legal for the model."""
    degrees = [2**power for power in range(ranks.bit_length())]
    for tp, pp in ((tp, pp) for tp in degrees for pp in degrees if tp * pp <= ranks):
        if pp <= spec.total_layers and spec.heads % tp == 0:
            yield ParallelSpec(tp=tp, pp=pp, dp=ranks // (tp * pp))


def box_cases() -> list[BoxCase]:
    """Every case, the smallest ranks first: all strategies on nodes of one rank, and the runs of ``cases.toml``."""
    found = [
        case(model, spec, read_box(f"{ranks}x1@{RATE}mbit"), parallel)
        for model, spec in MODELS.items()
        for ranks in SIZES
        for parallel in parallel_specs(spec, ranks)
    ]
    for row in cases("box")["runs"]:
        box = read_box(row["box"])
        if "mbits_per_s" in row:  # of each node's link
            box = replace(box, mbits_per_s=tuple(map(float, row["mbits_per_s"])))
        spec = replace(MODELS[row["model"]], **row.get("sizes", {}))
        named = row.get("batches", 0), row.get("suffix", "")
        for one in (case(row["model"], spec, box, ParallelSpec(**way), *named) for way in row["ways"]):
            stragglers = tuple(Straggler(**each) for each in row.get("stragglers", ()))
            job = replace(one.job, cluster=replace(one.job.cluster, stragglers=stragglers)) if stragglers else one.job
            found.append(replace(one, job=job))
    by_name = {one.name: one for one in found}
    return sorted(by_name.values(), key=lambda one: (one.job.cluster.num_devices, one.box.name, one.name))


def profiled_boxes() -> list[Box]:
    """Boxes in which collectives are measured alone."""
    return [read_box(text) for text in cases("box")["profiled"]]


def collectives_of(box: Box) -> list[Collective]:
    """Measurements of a box's collectives."""
    ranks, near, bytes_of = box.num_ranks, box.ranks_per_node, cases("box")["bytes"]
    layouts = sorted({(ranks, near), (box.nodes, 1), (near, near)})
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    found = [
        Collective(kind, size, *layout)
        for layout in layouts
        if layout[0] > 1
        for kind in kinds
        for size in bytes_of["collectives"]
    ]
    return found + [
        Collective("send_recv", n, 2, here) for here in (1, 2) if here <= near for n in bytes_of["messages"]
    ]


def sleeping(box: Box) -> SleepingLatency:
    """Sleeping times of the box's ranks, and its links from their facts."""
    return SleepingLatency(PRESETS[HARDWARE], box.links)


def measure_cases(cases: Sequence[BoxCase], out: Path) -> list[str]:
    """Run missing cases, one collection per box, and what ops and collectives take on their own.

    Small boxes first.  All of a box's runs take turns, so that a drift of the machine touches them alike.

    Returns:
        Names of runs that used too much of the cores.
    """
    rejected, boxes = [], dict[Box, list[BoxCase]]()
    # The work that a box's ranks really compute: copies and sums of gradients.
    ops = [Op(kind, (2**power,), "fp32") for kind in ("add", "copy", "elementwise") for power in (10, 16, 18, 20, 21)]
    for box in profiled_boxes():
        plan = box_plan(box, [], sleeping(box), collectives=collectives_of(box), ops=ops, event_seconds=EVENT_SECONDS)
        run_plan(plan, out / PROFILE / f"events-{box.name.replace('@', '-')}", progress=True)
    for found in cases:
        boxes.setdefault(found.box, []).append(found)
    for box, held in sorted(boxes.items(), key=lambda pair: (pair[0].num_ranks, pair[0].name)):
        role = "judge" if held[0].judges else "train"
        runs = [(each.file_name, role, each.job, {**COUNTS, "rounds": ROUNDS[role]}) for each in held]
        summary = run_plan(box_plan(box, runs, sleeping(box)), held[0].folder(out), progress=True)
        rejected += [each.name for each in held if each.file_name in summary["rejected"]]
    return rejected


def training_folders(out: Path) -> list[Path]:
    """Collections for training: all of ``profile``."""
    folders = sorted(folder for folder in (out / PROFILE).iterdir() if (folder / "plan.json").exists())
    for folder in folders:
        ranks = Box.from_dict(read_json(folder / "plan.json")["box"]).num_ranks
        if ranks > MOST_TRAINING_RANKS:
            raise CollectError(
                f"only boxes of at most {MOST_TRAINING_RANKS} ranks may train, got {ranks} ranks in {folder}"
            )
    return folders
