"""Writing the strategy that a search chose: as a job file, or as a training framework's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepsight.dataset.base.errors import StepsightError
from stepsight.verbs.options import check_configuration, check_result

if TYPE_CHECKING:
    from stepsight.experiments.search.choices import SearchResult
    from stepsight.experiments.search.space import Space
    from stepsight.training.predictor.predictor import Predictor

JOB_FILE = (".toml", rb"framework = |\[model\]")  # as stepsight writes it: no table of prices, no job with comments


def check_chosen(out: Path | None, to: str, asked: Path, force: bool = False) -> None:
    """Check, before the work, that the file can be written, has a known format and overwrites no file of the user.

    Raises:
        StepsightError: If not.
    """
    from stepsight.dataset.configs.writers import WRITERS

    if to and to not in WRITERS:
        raise StepsightError(f"--to must be one of {', '.join(WRITERS)}, got {to!r:.80}")
    if to and out is None:
        raise StepsightError(f"--to {to} needs --out, the file to write")
    if out is not None:
        if not to and out.suffix != ".toml":
            raise StepsightError(f"--out ends in .toml, got {str(out)!r:.80}; or name a format with --to")
        if out.exists() and asked.exists() and out.samefile(asked):
            raise StepsightError(f"--out must not be the file that is searched, got {str(out)!r:.80}: name a new file")
        if to:
            check_configuration(out, force)
        else:
            check_result("--out", out, JOB_FILE)


def write_chosen(
    result: SearchResult,
    out: Path,
    to: str,
    predictor: Predictor | str | None = None,
    space: Space | str | None = None,
) -> str:
    """Write the best strategy, or the best one that a format expresses; returns what to tell about it."""
    from stepsight.dataset.base.files import write_text
    from stepsight.dataset.configs.job_toml import job_toml
    from stepsight.dataset.configs.writers import write_config
    from stepsight.experiments.reports.config_report import written_text
    from stepsight.experiments.search.expressed import best_expressed

    if not to:
        write_text(out, job_toml(result.best.job))
        return f"wrote the best strategy to {out}"
    choice, all_legal = best_expressed(result, to, predictor, space)
    written = write_config((choice or result.best).job, to)
    write_text(out, written.text)
    which = "the legal strategies" if all_legal else "the strategies evaluated"
    if choice is None:
        words = (
            f"warning: {out} is not the best strategy, only what {to} expresses of it: of {which} that fit in memory, "
            f"{to} expresses none"
        )
    elif choice is result.best:
        words = f"wrote the best strategy to {out}"
    else:
        slower = 100 * (choice.timed[0] / result.best.timed[0] - 1)
        words = (
            f"wrote {choice.job.name} to {out}: {to} does not express the best strategy; of {which} that it expresses "
            f"this is the best ({slower:+.1f} % iteration time)"
        )
    return f"{words}\n{written_text(written, to)}"
