"""The verb that looks at this machine, or at a slow run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.config_options import read_job
from stepsight.verbs.options import Json, PredictorPath, answer, load, path


def doctor_command(
    run: Annotated[
        Path | None,
        typer.Argument(
            parser=path, metavar="RUN", help="A traced run, to find out why it is slow. Default: this machine."
        ),
    ] = None,
    *,
    job: Annotated[
        Path | None, typer.Option(parser=path, help="Job file of the run, if the run does not state its job.")
    ] = None,
    predictor: PredictorPath = None,
    as_json: Json = False,
) -> None:
    """Check this machine: libraries, GPUs, links, load, and what can be collected here. Or find out why a traced run
    is slow.

    For a run, the answer lists causes with evidence and advice: host-bound, data loader, waiting for peers, exposed
    communication, small messages, slow transport, throttling. If the run's job is known, the prediction is printed
    beside the measured step. Examples:

        stepsight doctor
        stepsight doctor runs/theirs --job job.toml
    """
    if run is None:
        if job is not None:
            raise StepsightError("--job is the job of a run: name the run folder too")
        from stepsight.experiments.reports.doctor_report import machine_text
        from stepsight.experiments.tasks.doctor import check_machine

        told = check_machine()
        answer(told, machine_text(told), as_json)
        return
    from stepsight.experiments.reports.doctor_report import diagnosis_text
    from stepsight.experiments.tasks.doctor import diagnose

    told = diagnose(run, None if job is None else read_job(job), load(predictor))
    answer(told, diagnosis_text(told), as_json)
