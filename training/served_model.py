"""A predictor served by MLflow: a frame of jobs as input, a frame of times and intervals as output.

``mlflow.pyfunc.load_model`` imports this module by its name and hands it the predictor's folder, so that nothing is
unpickled and no code of the model's own runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.training.prediction.ask_many import predict_many
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.tracking.tracking import ANSWERS, JOB

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class ServedModel:
    """The model inside the object that ``mlflow.pyfunc.load_model`` returns."""

    predictor: Predictor  # answers

    def predict(self, model_input: DataFrame, params: dict[str, Any] | None = None) -> DataFrame:
        """Predict jobs, a row for each, whose column ``job`` holds the job's tables as JSON.

        Returns seconds of an iteration, the 90 % interval, tokens per second and bytes of the fullest stage, all as
        floats.  Raises ``JobError`` if the column is missing, or a job breaks a rule.
        """
        import pandas

        if JOB not in model_input:
            raise JobError(
                f"the frame must have a column {JOB!r} of jobs as JSON, got {', '.join(map(str, model_input))}"
            )
        jobs = []
        for index, text in enumerate(model_input[JOB]):
            try:
                jobs.append(Job.from_dict(json.loads(text) if isinstance(text, str) else text))
            except (JobError, ValueError, TypeError, AttributeError) as error:
                raise JobError(f"row {index}: {error}") from None
        rows = [
            (p.iteration_time_s, p.low_s, p.high_s, p.tokens_per_s, float(p.memory.peak_bytes))
            for p in predict_many(jobs, self.predictor)
        ]
        return pandas.DataFrame(rows, columns=list(ANSWERS), index=model_input.index)


def _load_pyfunc(data_path: str) -> ServedModel:
    """Called by MLflow with the path of the predictor's folder."""
    return ServedModel(Predictor.load(Path(data_path)))
