"""Writing a predicted timeline as trace files of PyTorch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepsight.dataset.errors import StepsightError

if TYPE_CHECKING:
    from stepsight.training.predictor.prediction import Prediction


def check_traces(folder: Path | None, num_jobs: int) -> None:
    """Check, before the work, that traces of one job can be written to a new folder; None: none are wanted.

    Raises:
        StepsightError: If there are several jobs, or the folder has files.
    """
    if folder is None:
        return
    from stepsight.dataset.files import check_writable

    if num_jobs != 1:
        raise StepsightError(f"--traces takes one job, got {num_jobs}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StepsightError(f"--traces must be a new or empty folder, got {str(folder)!r:.80}")
    check_writable(folder)


def write_traces(prediction: Prediction, folder: Path) -> None:
    """Write a trace for the first rank of each pipeline stage, ``rank<number>.json``."""
    from stepsight.dataset.files import new_folder, write_json
    from stepsight.simulator.profiler_traces import profiler_traces
    from stepsight.verbs.options import progress

    written, stages = progress("stages written"), prediction.simulation.lowered.num_stages
    calibrated = prediction.iteration_time_s / prediction.simulation.iteration_time_s
    with new_folder(folder) as part:
        for done, (rank, trace) in enumerate(profiler_traces(prediction.simulation, calibrated)):
            write_json(part / f"rank{rank}.json", trace, indent=None)
            written(done + 1, stages)
