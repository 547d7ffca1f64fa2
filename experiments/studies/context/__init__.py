"""Compare the context network with simpler models, task by task, on groups that taught none of them.

    stepsight experiment context [--task regions] [--seeds 3] [--folds 3] [--data DIR] [--collect 18] [--json]

Each task has graphs with measured seconds and groups (families, traces, runs) that a split never parts.  The table
shows the error of every model on groups held out: a roofline, the regressors, a table by kind and phase, trees on
features of a node and of its neighbours, a sum over nodes without edges, and networks that pass messages, with and
without each kind of edge and each kind of label.  A task is won when the network beats the best other model by more
than two standard errors of their paired difference.  The tasks ``overlap-steps``, ``pairs-steps`` and ``gaps`` replay
whole steps of traces with predicted times of overlapped kernels, of overlapped ops of two ranks, or of the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from stepsight.dataset.base.errors import StepsightError
from stepsight.experiments.studies.context.benchmark import judge
from stepsight.experiments.studies.context.benchmark_report import outcome_dict, outcome_text
from stepsight.experiments.studies.context.cluster_task import cluster_task
from stepsight.experiments.studies.context.context_task import ContextTask
from stepsight.experiments.studies.context.gaps import judge_gaps
from stepsight.experiments.studies.context.more_families import FAMILIES
from stepsight.experiments.studies.context.overlap_steps import judge_overlap_steps
from stepsight.experiments.studies.context.overlap_task import overlap_task
from stepsight.experiments.studies.context.pair_steps import judge_pair_steps
from stepsight.experiments.studies.context.pairs_task import pairs_task
from stepsight.experiments.studies.context.region_collecting import collect
from stepsight.experiments.studies.context.regions_task import regions_task, unseen_regions_task
from stepsight.experiments.studies.context.step_errors import StepTable
from stepsight.experiments.studies.context.traced_ops_task import ops_task
from stepsight.experiments.studies.context.unseen_families import UNSEEN
from stepsight.experiments.studies.pairs.pair_collecting import collect_pairs
from stepsight.training.tracking import default_uri

UNSEEN_REGIONS, UNSEEN_FOLDER = "unseen-regions", "regions"  # families that judge once
TASKS: dict[str, Callable[[Path], ContextTask]] = {
    "regions": regions_task,
    UNSEEN_REGIONS: unseen_regions_task,
    "overlap": overlap_task,
    "pairs": pairs_task,
    "ops": ops_task,
    "cluster": cluster_task,
}
PAIRS = "pairs"
STEPS = "steps"  # of compiled training, which are judged in another way
STEP_TASKS: dict[str, tuple[str, Callable[[Path], StepTable]]] = {  # with the folder of their data
    "overlap-steps": ("overlap", judge_overlap_steps),
    "pairs-steps": ("pairs", judge_pair_steps),
    "gaps": ("gaps", judge_gaps),
}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    try:
        if options.task == STEPS:
            return _steps(options)
        if options.collect is not None:
            _collect(options)
        folders = {name: UNSEEN_FOLDER if name == UNSEEN_REGIONS else name for name in TASKS}
        folders |= {name: folder for name, (folder, _) in STEP_TASKS.items()}
        names = _tasks_with_data(options, folders)
        outcomes, tables = [], []
        for name in names:
            own = options.data / folders[name]
            own = own if own.exists() else options.data
            if name in STEP_TASKS:
                tables.append(STEP_TASKS[name][1](own))
                continue
            task = TASKS[name](own)
            uri = options.tracking_uri or default_uri(options.data / "predictor")
            wanted = {"only": options.only, "variants": not options.no_variants, "trials": options.trials}
            cache = None if options.again else options.data / "judged"
            outcomes.append(
                judge(task, seeds=options.seeds, folds=options.folds, cache=cache, tracking_uri=uri, **wanted)
            )
    except StepsightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([*map(outcome_dict, outcomes), *(each.to_dict() for each in tables)]))
    else:
        print("\n\n".join([*map(outcome_text, outcomes), *(each.text() for each in tables)]))
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stepsight experiment context", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--task",
        choices=sorted([*TASKS, *STEP_TASKS, STEPS]),
        help="one task; all whose data are there but steps, if left out",
    )
    parser.add_argument(
        "--eager", type=Path, help="for --task steps: folder of `stepsight experiment architectures`, which teaches"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("runs/context"),
        help="folder with a folder for each task, or that of one --task",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], help="models whose names hold this word (repeatable)")
    parser.add_argument(
        "--trials", type=int, default=0, help="also networks whose settings an Optuna study of so many trials chooses"
    )
    parser.add_argument("--tracking-uri", help="MLflow store of the trials; an SQLite database in --data, if left out")
    parser.add_argument("--no-variants", action="store_true", help="leave out networks without each kind of edge")
    parser.add_argument(
        "--collect",
        type=int,
        metavar="N",
        help="first measure on this machine: N functions of each family of regions; with --task pairs each job N times",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="judge everything anew; else what was judged before is read from DATA/judged",
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _collect(options: argparse.Namespace) -> None:
    """Measure jobs of two ranks, or regions."""
    if options.task == PAIRS:
        collect_pairs(options.data / PAIRS, options.collect)
        return
    families = UNSEEN if options.task == UNSEEN_REGIONS else FAMILIES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect(options.data / "regions", options.collect, families=families)


def _tasks_with_data(options: argparse.Namespace, folders: Mapping[str, str]) -> list[str]:
    """The task that was asked for, or all whose folders are there."""
    if not options.data.is_dir():
        raise StepsightError(
            f"--data must be the folder of what was measured (docs/results/context.md says how), got {options.data}"
        )
    found = [name for name, each in folders.items() if (options.data / each).exists() and name != UNSEEN_REGIONS]
    names = [options.task] if options.task else found
    if not names:
        raise StepsightError(f"{options.data} must hold a folder for a task ({', '.join(folders)}), got none")
    return names


def _steps(options: argparse.Namespace) -> int:
    """Measure, capture and predict compiled training steps."""
    from stepsight.experiments.studies.context.compiled_steps import capture_steps, figures_of, judge_steps, steps_text
    from stepsight.experiments.studies.context.step_collecting import collect_steps, read_steps

    if options.eager is None:
        raise StepsightError("--task steps must have --eager, the folder of `stepsight experiment architectures`")
    if options.collect is not None:
        collect_steps(options.data / STEPS, range(options.collect))
        capture_steps(options.data / "programs", read_steps(options.data / STEPS))
    rows = judge_steps(options.data, options.eager)
    told = {"figures": figures_of(rows), "steps": [asdict(row) for row in rows]}
    print(json.dumps(told) if options.json else steps_text(rows))
    return 0
