"""The controls of a job: a slider or a row of choices for each field, where what breaks a rule is greyed."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from stepsight.dataset.base.bounded import MOST_TABLES
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.capture.captured import MANIFEST, read_captured
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.configs.drafts import Given
from stepsight.dataset.configs.formats import ConfigJob, is_job_file, read_configs
from stepsight.dataset.job.job import Job
from stepsight.dataset.runs.run_folder import run_folders
from stepsight.experiments.questions.job_facts import Field, broken_rules, fields_of, value_of
from stepsight.experiments.questions.traced_runs import ReplayedRun, one_run
from stepsight.experiments.reports.text_table import shown, words
from stepsight.training.prediction.captured_prediction import CapturedPrediction, predict_captured

DRAG_S = 0.04  # between two answers while a slider moves
_VALUE = "(e) => emit(e.target.value)"
_CHOSEN = """(e) => {
  if (e.target.dataset.value === undefined || (e.key && e.key !== "Enter" && e.key !== " ")) return;
  e.preventDefault(); emit(e.target.dataset.value);
}"""
OnChange = Callable[[Field, str], None]


def html(content: str = "", tag: str = "div") -> ui.html:
    """An element of text that this package has escaped."""
    return ui.html(content, sanitize=False, tag=tag)


def section(name: str) -> ui.element:
    """A section with its title, that a link leads to."""
    made = ui.element("section").props(f"id=section-{name.lower()}")
    with made:
        html(escape(name), "h2")
    return made


def button(text: str, test_id: str, on_click: Callable[..., Any]) -> ui.html:
    """A button for keyboard and pointer."""
    return html(escape(text), "button").classes("chip").props(f"data-testid={test_id}").on("click", on_click)


def text_input(test_id: str, label: str, on_change: Callable[[str], Any], **props: Any) -> Element:
    """An input line with its label."""
    with ui.element("div").classes("field"):
        html(f"<span>{escape(label)}</span>", "label").props(f"for={test_id}")
        made = ui.element("input").props(f"id={test_id} data-testid={test_id}")
        made.props.update({"type": "text", "aria-label": label, **props})
        made.on("change", lambda e: on_change(str(e.args)), js_handler=_VALUE)
    return made


def on_choice(element: Element, choose: Callable[[str], Any]) -> None:
    """Call with the ``data-value`` of what is clicked, or chosen by keyboard, within an element."""
    element.on("click", lambda e: choose(str(e.args)), js_handler=_CHOSEN)
    element.on("keydown", lambda e: choose(str(e.args)), js_handler=_CHOSEN)


class Controls:
    """The fields of a job."""

    def __init__(self, job: Job, on_change: OnChange) -> None:
        self.fields = fields_of(job)
        self._on_change = on_change
        self._sliders: dict[str, Element] = {}
        self._numbers: dict[str, Element] = {}
        self._chips: dict[str, dict[Any, ui.html]] = {}
        for group, fields in groupby(self.fields, key=lambda field: field.group):
            html(escape(group), "h2")
            for field in fields:
                self._add(field)
        self.show(job)

    def _add(self, field: Field) -> None:
        label, change = words(field.key), self._on_change
        with ui.element("div").classes("field"):
            with ui.element("label"):
                html(escape(label), "span")
                if field.is_number:
                    number = ui.element("input").props(f"type=number min=0 step=any data-testid={field.test_id}-value")
                    number.props["aria-label"] = label
                    number.on("change", lambda e: change(field, str(e.args)), js_handler=_VALUE)
                    self._numbers[field.key] = number
            if field.is_number:
                slider = ui.element("input").props(f"type=range min=0 max={len(field.values) - 1} step=1")
                slider.props.update({"data-testid": field.test_id, "aria-label": label})

                def dragged(event: GenericEventArguments) -> None:
                    at = int(event.args)
                    with slider.props.suspend_updates():  # the browser has moved it already
                        slider.props["value"] = at
                    change(field, str(field.values[at]))

                slider.on("input", dragged, throttle=DRAG_S, js_handler=_VALUE)
                self._sliders[field.key] = slider
            row = ui.element("div").classes("chips").props(f"role=group data-testid={field.test_id}-choices")
            with row:
                self._chips[field.key] = {value: self._chip(field, value) for value in field.values}
            on_choice(row, lambda text: change(field, text))

    def _chip(self, field: Field, value: Any) -> ui.html:
        chip = html(escape(f"{value:.4g}" if isinstance(value, float) else shown(value)), "button").classes("chip")
        chip.props["data-value"] = str(value)
        chip.props["tabindex"] = "-1" if field.is_number else "0"  # the slider has a number's values
        return chip

    def show(self, job: Job) -> None:
        """Let all controls show the values of a job."""
        for field in self.fields:
            value = value_of(job, field.key)
            if field.key in self._sliders:
                slider, number = self._sliders[field.key], self._numbers[field.key]
                _set(slider, **{"value": field.nearest(value), "aria-valuetext": shown(value)})
                _set(number, value=f"{value:.6g}" if isinstance(value, float) else str(value))
            for each, chip in self._chips[field.key].items():
                chip.classes(add="chosen") if each == value else chip.classes(remove="chosen")
                _set(chip, **{"aria-pressed": "true" if each == value else "false"})

    def show_rules(self, job: Job) -> None:
        """Grey the values that break a rule; the rule is their tooltip."""
        for field in self.fields:
            rules = broken_rules(job, field)
            for value, chip in self._chips[field.key].items():
                rule = rules.get(value)
                chip.classes(add="illegal") if rule else chip.classes(remove="illegal")
                _set(chip, **{"title": rule, "aria-disabled": "true" if rule else None})


def _set(element: Element, **props: Any) -> None:
    """Set what has changed: all else would be sent to the browser again."""
    for name, value in props.items():
        if element.props.get(name) != value:
            element.props.set_optional(name, value)


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
