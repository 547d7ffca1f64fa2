"""Errors on published runs, which decide how wide intervals of shipped predictors are.

``python -m stepsight.experiments.evaluation.interval_widths RUNS`` writes them for ``training.intervals``.

To be run after shipped predictors or what is simulated have changed: widths are those of the errors as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from stepsight.dataset.base.errors import StepsightError
from stepsight.dataset.base.files import write_text
from stepsight.experiments.evaluation.evaluate import Evaluation, evaluate
from stepsight.training.intervals.published_errors import PRESET, Off, Widths, likeness_of
from stepsight.training.shipped.catalogue import shipped_predictor


def widths_of(evaluation: Evaluation) -> Widths:
    """Errors of every row whose hardware has a shipped predictor."""
    sources: dict[str, list[Off]] = defaultdict(list)
    for row in evaluation.scored:
        if shipped_predictor(row.job.cluster.hardware) is not None:
            error = abs(math.log(row.measured_s / row.predicted_s))
            sources[row.row.source].append(Off(row.digest, likeness_of(row.job), row.unsupported_share, error))
    return Widths({name: tuple(rows) for name, rows in sources.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m stepsight.experiments.evaluation.interval_widths", description=__doc__
    )
    parser.add_argument("runs", type=Path, help="table of published runs")
    parser.add_argument("--out", type=Path, default=PRESET, help="file to write; by default the one of the package")
    args = parser.parse_args(arguments)
    try:
        found = widths_of(evaluate(args.runs))
        write_text(args.out, json.dumps(found.to_dict()).replace("]], ", "]],\n").replace("], [", "],\n[") + "\n")
    except (StepsightError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{sum(map(len, found.sources.values()))} runs of {len(found.sources)} sources: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
