"""Writing the strategy that a search chose: as a job file, or as a training framework's configuration."""

from __future__ import annotations

from pathlib import Path

from stepsight.dataset.errors import StepsightError
from stepsight.dataset.job import Job


def check_chosen(out: Path | None, to: str) -> None:
    """Before the work: a file that can be written, of a known format.

    Raises:
        StepsightError: If not.
    """
    from stepsight.dataset.configs.writers import WRITERS
    from stepsight.dataset.files import check_output_file

    if to and to not in WRITERS:
        raise StepsightError(f"--to must be one of {', '.join(WRITERS)}, got {to!r:.80}")
    if to and out is None:
        raise StepsightError(f"--to {to} needs --out, the file to write")
    if out is not None:
        if not to and out.suffix != ".toml":
            raise StepsightError(f"--out ends in .toml, got {str(out)!r:.80}; or name a format with --to")
        check_output_file(out)


def write_chosen(job: Job, out: Path, to: str) -> str:
    """Write a job; returns what to tell about it."""
    from stepsight.dataset.configs.job_toml import job_toml
    from stepsight.dataset.configs.writers import write_config
    from stepsight.dataset.files import write_text
    from stepsight.experiments.reports.config_report import written_text

    if not to:
        write_text(out, job_toml(job))
        return f"wrote the best strategy to {out}"
    written = write_config(job, to)
    write_text(out, written.text)
    return f"wrote the best strategy to {out}\n{written_text(written, to)}"
