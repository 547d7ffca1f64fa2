"""What the page opens: files of one folder, uploaded files, and jobs in links."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepsight.dataset.base.bounded import MOST_TABLES
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.capture.captured import MANIFEST, read_captured
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.formats import ConfigJob, is_job_file, read_configs
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import run_folders
from stepsight.experiments.questions.traced_runs import ReplayedRun, one_run
from stepsight.training.prediction.captured_prediction import CapturedPrediction, predict_captured

_SUFFIXES = (".toml", ".json", ".yaml", ".yml", ".sh", ".py")
MOST_FILES, DEEPEST = 200, 3  # that are offered, and folders within each other
Opened = Job | CapturedPrediction | ReplayedRun


@dataclass(frozen=True)
class Workspace:
    """The folder that a page reads, and what it starts with.

    Attributes:
        root: The only folder whose files are read.
        hardware: For configurations, which do not state it; empty: the usual one.
        predictor: As in ``predict``.
        address: Of the page, without a job.
        opened: What the user named: the first job is shown, other jobs are pinned.
    """

    root: Path
    hardware: str = ""
    predictor: Any = None
    address: str = ""
    opened: tuple[Opened, ...] = ()

    def names(self) -> list[str]:
        """Files and folders that may be opened, by their paths within the folder."""
        found = sorted(self._offered(self.root, 1))
        return [str(path.relative_to(self.root)) for path in found[:MOST_FILES]]

    def _offered(self, folder: Path, depth: int) -> Iterator[Path]:
        for path in folder.iterdir():
            if path.name.startswith("."):
                continue
            if path.is_dir() and ((path / MANIFEST).is_file() or (path / "runs").is_dir()):
                yield path
            elif path.is_dir() and depth < DEEPEST and not path.is_symlink():
                yield from self._offered(path, depth + 1)
            elif path.suffix in _SUFFIXES and path.is_file():
                yield path

    def open(self, name: str, hardware: str = "") -> tuple[Opened, str]:
        """Open a job, a configuration, a captured script or a traced run, and tell what was assumed.

        Args:
            name: Path within the folder.
            hardware: For captured scripts, where the user names none.

        Raises:
            StepsightError: If it lies outside of the folder, or is nothing that can be opened.
        """
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise StepsightError(f"a file must be in {self.root}, where the page was started, got {name!r:.80}")
        if not path.is_dir():
            return self.read([path])
        if (path / MANIFEST).is_file():
            captured = read_captured(path)
            return predict_captured(captured, self.hardware or hardware, "", self.predictor), ""
        run_folders(path)
        return ReplayedRun.read(one_run(path, "the page", traced=True)), ""

    def read(self, paths: Sequence[Path]) -> tuple[Job, str]:
        """Read a job from a job file, or from the configurations of one run."""
        if len(paths) == 1 and is_job_file(paths[0]):
            return Job.from_file(paths[0]), ""
        stated = {"cluster.hardware": self.hardware} if self.hardware else {}
        found: ConfigJob = read_configs(paths, Given(values=stated))
        assumed = ", ".join(f"{key} = {value}" for key, value in found.assumed.items())
        return found.job, f"read as {' and '.join(found.formats)}; assumed: {assumed or 'nothing'}"

    def uploaded(self, files: Mapping[str, bytes]) -> tuple[Job, str]:
        """Read a job from the content of files by name."""
        with TemporaryDirectory(prefix="stepsight-page-") as folder:
            paths = [Path(folder) / (Path(name).name or "file") for name in files]
            for path, content in zip(paths, files.values(), strict=True):
                path.write_bytes(content)
            try:
                return self.read(paths)
            except StepsightError as error:
                raise StepsightError(str(error).replace(f"{folder}/", "")) from None


def job_link(job: Job) -> str:
    """The job as text for an address."""
    return base64.urlsafe_b64encode(zlib.compress(job_toml(job).encode(), 9)).decode()


def linked_job(space: Workspace, text: str) -> Job:
    """The job of ``job_link``.

    Raises:
        JobError: If the text holds none, or more bytes than a job file may have.
    """
    try:
        unpack = zlib.decompressobj()
        content = unpack.decompress(base64.urlsafe_b64decode(text), MOST_TABLES)
        if unpack.unconsumed_tail or not unpack.eof:
            raise ValueError("it is cut off or too long")
    except (ValueError, zlib.error) as error:
        raise JobError(f"the address must hold a whole job, got {text!r:.40}: {error}") from None
    return space.uploaded({"link.toml": content})[0]
