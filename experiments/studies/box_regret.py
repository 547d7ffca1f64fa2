"""Run the strategy that a search finds for sixteen ranks, and others, in boxes.

Every legal strategy that the harness can run in the box is predicted.  Those predicted to be fastest and a random
sample of the others are run for real.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import check_writable, write_json
from stepsight.dataset.job.job import BatchSpec, ClusterSpec, Job, ModelSpec, ParallelSpec
from stepsight.dataset.runs.box_spec import HARDWARE, Box, read_box
from stepsight.experiments.evaluation.error_metrics import errors
from stepsight.experiments.search.choices import Choice
from stepsight.experiments.search.search import search
from stepsight.experiments.search.space import Space
from stepsight.experiments.tasks.verifying import runnable, verify
from stepsight.training.predictor.predictor import Predictor

BOX = "16x1@100mbit"
_SHARED: dict[str, Any] = {"heads": 16, "vocab": 2048, "seq_len": 64}
MODELS = {  # none of them is among those that ``small-to-large`` trains on
    "llama": ModelSpec(family="llama", layers=16, hidden=256, ffn=512, **_SHARED),
    "gpt": ModelSpec(family="gpt", layers=12, hidden=384, **_SHARED),
}
GLOBAL_BATCH = 16
SPACE = Space(
    max_tp=16,
    micro_batches=(1, 2),
    schedules=(("1f1b", 1), ("1f1b", 2), "gpipe", "zb-h1", "looped-bfs", "interleaved-zb", "zbv", "dualpipev"),
    zero_stages=(0, 3),
    recompute=("none",),
    cp=(1,),
)
COUNTS = {"rounds": 2, "steps": 1, "warmup": 1, "profile_steps": 0}


def job_in(box: Box, model: ModelSpec) -> Job:
    """The job to search: a model on a box, with the simplest strategy."""
    cluster = ClusterSpec(hardware=HARDWARE, nodes=box.nodes, devices_per_node=box.ranks_per_node, fabric=box.fabric)
    batch = BatchSpec(micro_batch=1, global_batch=GLOBAL_BATCH, precision="fp32")
    return box.holds(Job(model=model, parallel=ParallelSpec(dp=box.num_ranks), batch=batch, cluster=cluster))


def chosen(fastest_first: Sequence[Choice], most: int, slowest: float, seed: int) -> list[Choice]:
    """Strategies to run: half of them the fastest predicted ones, half drawn from the rest without very slow ones."""
    if len(fastest_first) <= most:
        return list(fastest_first)
    first = fastest_first[: (most + 1) // 2]
    limit = slowest * first[0].timed[0]
    rest = [choice for choice in fastest_first[len(first) :] if choice.timed[0] <= limit]
    drawn = Random(seed).sample(rest, min(most - len(first), len(rest)))
    return [*first, *sorted(drawn, key=lambda choice: choice.timed[0])]


def study(
    name: str, box: Box, predictor: Predictor | str | None, out: Path, *, most: int, slowest: float, seed: int
) -> dict[str, Any]:
    """Search one model, run the choice and others, compare."""
    found = search(job_in(box, MODELS[name]), predictor, space=SPACE, sampler="enumerate")
    fitting = {choice.job: choice for choice in found.choices if choice.fits}
    can_run = {id(job) for job in runnable(list(fitting), None, box)[0].values()}
    ranked = [choice for job, choice in fitting.items() if id(job) in can_run]
    runs = chosen(ranked, most, slowest, seed)
    verified = verify([choice.job for choice in runs], out / name, predictor, counts=COUNTS, box=box, progress=True)
    return {
        "model": name,
        "legal": found.legal,
        "runnable": len(ranked),
        "run": len(runs),
        **judged([choice.job.name for choice in runs], verified["runs"]),
        "text": verified["text"],
    }


def judged(fastest_first: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The strategy with the shortest predicted time among valid runs.

    Args:
        fastest_first: Names of the strategies that were run, as predicted.
        rows: What was measured; runs that kept the cores too busy are missing.
    """
    by_name = {row["name"]: row for row in rows}
    counting = [by_name[name] for name in fastest_first if name in by_name]
    measured, predicted = [row["measured_s"] for row in counting], [row["predicted_s"] for row in counting]
    if not counting:
        return {"measured": 0, "chosen": None, "place": None, "regret_percent": None, "runs": []}
    best, figures = min(measured), errors(predicted, measured)
    return {
        "measured": len(counting),
        "chosen": counting[0]["name"],
        "faster_too_busy": fastest_first.index(counting[0]["name"]),
        "place": 1 + sum(seconds < measured[0] for seconds in measured),
        "regret_percent": 100 * (measured[0] / best - 1),
        "random_regret_percent": 100 * (sum(measured) / len(measured) / best - 1),
        "mape": figures.mape,
        "spearman": figures.spearman,
        "runs": counting,
    }


def study_text(rows: Sequence[dict[str, Any]]) -> str:
    """The report as text."""
    parts = []
    for row in rows:
        lines = [
            f"{row['model']}: {row['runnable']} of {row['legal']} legal strategies can run in the box; "
            f"{row['run']} ran, {row['measured']} of them used little enough of the cores to be valid",
            row["text"],
        ]
        if row["measured"]:
            rank = "-" if row["spearman"] is None else f"{row['spearman']:.3f}"
            lines += [
                f"chosen: {row['chosen']}; of those predicted to be faster {row['faster_too_busy']} do not count",
                f"place {row['place']} of {row['measured']} measured, regret {row['regret_percent']:.1f} %; "
                f"a random one of them: {row['random_regret_percent']:.1f} %",
                f"iteration times: MAPE {row['mape']:.1f} %, Spearman {rank}",
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="stepsight experiment box-search",
        description=f"{__doc__} Needs root and iproute2; half an hour with the defaults. A killed study goes on.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/box-search"), help="folder of the runs; resumed")
    parser.add_argument(
        "--predictor",
        type=Path,
        help="folder of a predictor of boxes, as small-to-large trains it (runs/small-to-large/box/predictor-*); "
        "default: hardware facts",
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one (repeatable)")
    parser.add_argument("--box", default=BOX, help=f"as of collect; default {BOX}")
    parser.add_argument("--most", type=int, default=24, help="strategies to run of a model")
    parser.add_argument(
        "--slowest",
        type=float,
        default=3.0,
        help="draw only strategies predicted to take at most this many times the best",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.out)
        predictor = None if options.predictor is None else Predictor.load(options.predictor)
        if options.most < 1:
            raise StepsightError(f"--most must be >= 1, got {options.most}")
        rows = [
            study(name, read_box(options.box), predictor, options.out.resolve(), most=options.most,
                  slowest=options.slowest, seed=options.seed)
            for name in options.model or MODELS
        ]  # fmt: skip
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = study_text(rows)
    figures = {"models": [{key: value for key, value in row.items() if key != "text"} for row in rows]}
    write_json(options.out / "box-search.json", figures)
    print(json.dumps(figures) if options.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
