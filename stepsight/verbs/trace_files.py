"""Writing a predicted timeline as trace files of PyTorch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stepsight.dataset.base.errors import StepsightError

MOST_BYTES = 200e6  # of traces that are written without being asked for by stage
BYTES_OF_KERNEL = 900  # its operator, launch, arrow and the kernel itself

if TYPE_CHECKING:
    from stepsight.training.predictor.prediction import Prediction


def check_traces(folder: Path | None, num_jobs: int) -> None:
    """Check, before the work, that traces of one job can be written to a new folder; None: none are wanted.

    Raises:
        StepsightError: If there are several jobs, or the folder has files.
    """
    if folder is None:
        return
    from stepsight.dataset.base.files import check_writable

    if num_jobs != 1:
        raise StepsightError(f"--traces takes one job, got {num_jobs}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StepsightError(f"--traces must be a new or empty folder, got {str(folder)!r:.80}")
    check_writable(folder)


def write_traces(prediction: Prediction, folder: Path, asked: str = "") -> None:
    """Write a trace for the first rank of pipeline stages, ``rank<number>.json``.

    Args:
        prediction: Of the job.
        folder: Where to.
        asked: Numbers of stages, as ``0,15``, or ``all``; empty: all, or the first and the last where all would be more
            than ``MOST_BYTES``, with a message.

    Raises:
        StepsightError: If the job has no such stage.
    """
    from stepsight.dataset.base.files import new_folder, write_json
    from stepsight.simulator.iteration.profiler_traces import profiler_traces
    from stepsight.verbs.options import progress

    stages = _stages(prediction, asked)
    written = progress("stages written")
    calibrated = prediction.iteration_time_s / prediction.simulation.iteration_time_s
    with new_folder(folder) as part:
        for done, (rank, trace) in enumerate(profiler_traces(prediction.simulation, calibrated, stages)):
            write_json(part / f"rank{rank}.json", trace, indent=None)
            written(done + 1, len(stages))


def _stages(prediction: Prediction, asked: str) -> list[int]:
    from stepsight.simulator.iteration.profiler_traces import num_kernels
    from stepsight.verbs.options import listed

    every = list(range(prediction.simulation.lowered.num_stages))
    if asked and asked != "all":
        words = listed("--trace-stages", asked, "numbers of stages")
        if not all(word.isascii() and word.isdigit() and int(word) in every for word in words):
            raise StepsightError(
                f"--trace-stages must be all, or numbers of stages from 0 to {every[-1]} separated by commas, "
                f"got {asked!r:.80}"
            )
        return sorted({int(word) for word in words})
    size = BYTES_OF_KERNEL * sum(num_kernels(prediction.simulation))
    if asked == "all" or size <= MOST_BYTES or len(every) <= 2:
        return every
    typer.echo(
        f"traces of all {len(every)} stages would take about {size / 1e6:,.0f} MB: the first and the last stage are "
        "written; --trace-stages all writes all, --trace-stages 0,1 those two",
        err=True,
    )
    return [every[0], every[-1]]
