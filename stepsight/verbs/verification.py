"""The verb that runs strategies and compares predicted with measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.config_options import read_job
from stepsight.verbs.options import Box, Json, PredictorPath, answer, load, path


def verify_command(
    jobs: Annotated[
        list[Path], typer.Argument(parser=path, help="Job files to run, or one job whose best strategies to run.")
    ],
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", parser=path, help="Collection folder. A collection that was killed resumes there."),
    ],
    search: Annotated[
        Path | None,
        typer.Option(parser=path, help="File with strategies to run: the output of `stepsight search JOB --json`."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, help="Number of best strategies to run. Without --search, a search finds them first."),
    ] = None,
    predictor: PredictorPath = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Repeats, interleaved over the runs so that drift becomes visible.")
    ] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 4,
    box: Box = None,
    as_json: Json = False,
) -> None:
    """Run the best strategies of a search, or job files, and print predicted beside measured times.

    Runs are made as in `stepsight collect`: with one core or GPU for each rank, or in a box, where ranks sleep instead
    of computing. Strategies that the harness cannot run are skipped and named. Examples:

        stepsight verify job.toml --top 3 --out runs/verified --predictor runs/predictor
        stepsight search job.toml --json > found.json
        stepsight verify job.toml --search found.json --top 3 --box 4x1@200mbit --out runs/verified
    """
    from stepsight.dataset.base.files import check_writable, read_json
    from stepsight.dataset.runs.box_spec import read_box
    from stepsight.experiments.tasks.verifying import strategies_of, verify

    held = None if box is None else read_box(box)
    check_writable(out)
    if len(jobs) > 1 and (search is not None or top is not None):
        raise StepsightError(f"--search and --top take one job, got {len(jobs)}")
    read, loaded = [read_job(job) for job in jobs], load(predictor)
    if held is not None:
        read = [held.holds(job) for job in read]
    if search is not None:
        try:
            found = read_json(search)
        except OSError as error:
            raise StepsightError(f"cannot read the result of a search {search}: {error.strerror}") from None
        except ValueError as error:
            raise StepsightError(f"{search} is not valid JSON: {error}") from None
        read = strategies_of(read[0], found if isinstance(found, dict) else {})
    elif top is not None:
        from stepsight.experiments.search.search import search as search_strategies

        choices = search_strategies(read[0], loaded).choices
        read = [choice.job for choice in choices if choice.fits]
    warmup = 1 if held is not None else 2
    counts = {"rounds": rounds, "steps": steps, "warmup": warmup, "profile_steps": 0}
    value = verify(read, out, loaded, most=top, counts=counts, box=held, progress=True)
    answer(value, value.pop("text"), as_json)
