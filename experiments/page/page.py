"""The page in the browser: ask, see, compare, search, traces and share, with answers that follow the controls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from nicegui import run, ui
from nicegui.events import MultiUploadEventArguments

from stepsight.dataset.base.bounded import MOST_TABLES, read_toml
from stepsight.dataset.base.errors import StepsightError, printable
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.job.job import Job
from stepsight.experiments.page import views
from stepsight.experiments.page.charts import SCRIPT, timeline_call, timeline_html
from stepsight.experiments.page.controls import Controls, button, chips, html, section, text_input
from stepsight.experiments.page.sections import SearchSection, StoppedError, TraceSection
from stepsight.experiments.page.server import MOST_DROPPED, TOO_LARGE, Workspace, job_link, linked_job
from stepsight.experiments.questions.compare import compare_sides, predicted_side
from stepsight.experiments.questions.job_facts import Field, changed, job_facts
from stepsight.experiments.questions.training_plan import training_plan, usual_amount
from stepsight.experiments.reports.text_table import shown, words
from stepsight.experiments.search.settings import Goal
from stepsight.training.prediction.prediction import Prediction, predict

if TYPE_CHECKING:
    from stepsight.experiments.page.server import Opened

PAUSE_S = 0.3  # without a change, before what takes longer is computed
MOST_PINS = 8
_START = read_toml(Path(__file__).with_name("start.toml"))  # where the user names no job
_LINK = "Link to this job; it opens while this page runs on this machine. To send a job, save it as a file"
_NOT_PINNED = "<p>Pin an answer, then change the job.</p>"
_SECTIONS = ("Time", "Timeline", "Sensitivity", "Compare", "Search", "Traces", "Share")


def make_app(space: Workspace) -> FastAPI:
    """The application; each tab of a browser has its own state."""
    app = FastAPI(openapi_url=None)
    jobs = [found for found in space.opened if isinstance(found, Job)] or [Job.from_dict(_START)]
    asked = [predict(job, space.predictor) for job in jobs]  # every tab shows them: none predicts them again
    asked[0].to_dict()

    @ui.page("/")
    def page(job: str = "") -> None:
        Desk(space, asked, job)

    gc.freeze()  # later collections need not walk through libraries and predictors, which takes half a second
    gc.enable()
    ui.run_with(app, title="stepsight", dark=None, tailwind=False, show_welcome_message=False)
    return app


class Desk:
    """One tab of a browser: a job with its answer, pinned answers, a search, and a traced run."""

    def __init__(self, space: Workspace, asked: list[Prediction], link: str) -> None:
        """``asked``: the answer to begin with, and those that are pinned; ``link``: the job of the address, if any."""
        self.space, self.goal = space, Goal(tokens=usual_amount(asked[0].job))
        self.prediction, self.pins = asked[0], asked[1:]
        self._controls: Controls
        self._version, self._resting, self._shown = 0, 0, 0  # of the answer; that rests; whose details are shown
        ui.add_head_html(f"<style>{views.style()}</style><script>{SCRIPT.read_text('utf-8')}</script>")
        with ui.element("div").classes("desk"):
            with ui.element("div").classes("controls"):
                self._add_files()
                self._control_box = ui.element("div")
            with ui.element("div"):
                self._add_answer()
                self.search = SearchSection(space.predictor, lambda: (self.prediction.job, self.goal), self.take)
                self.traces = TraceSection()
                with section("Share"):
                    button("Save all as one file", "export", self._export)
                    save = lambda: ui.download.content(job_toml(self.prediction.job), "job.toml")
                    button("Save the job as a file", "save-job", save)
                    self._link = text_input("link", _LINK, readonly="readonly")
        self._show(self.prediction, rebuild=True)
        for found in space.opened:
            if not isinstance(found, Job):
                self.traces.show(found)
        ui.timer(PAUSE_S, self._look_closer)
        ui.on_exception(lambda error: self.say(f"this is a fault of stepsight, please report it: {error!r:.200}"))
        if link:
            self.attempt(lambda: self.ask(linked_job(space, link), rebuild=True))

    def _add_files(self) -> None:
        html("stepsight", "h1")
        self._theme = ui.dark_mode(None)
        with chips():
            for name, dark in (("as the system", None), ("light", False), ("dark", True)):
                button(name, f"theme-{name.split()[-1]}", partial(self._set_theme, dark))
        text_input("file", "File or folder, from where the page was started", self._open, list="files")
        names = "".join(f'<option value="{escape(name)}"></option>' for name in self.space.names())
        html(names, "datalist").props("id=files")
        self._files = ui.upload(
            label="Drop job files or configurations", multiple=True, auto_upload=True, max_file_size=MOST_TABLES,
            max_files=MOST_DROPPED, on_multi_upload=self._upload, on_rejected=lambda: self.say(TOO_LARGE),
        ).props("flat bordered data-testid=upload").classes("full-width")  # fmt: skip
        self._message = ui.label().classes("warning").props("role=alert data-testid=message")

    def _add_answer(self) -> None:
        html("".join(f'<a href="#section-{name.lower()}">{name}</a>' for name in _SECTIONS), "nav").classes("controls")
        self._title = html("", "h1").props("data-testid=job")
        self._answer, self._said = html().classes("top"), html()
        with section("Time"):
            self._time, self._memory = html(), html()
        with section("Timeline"):
            html(timeline_html())
            self._over_time, self._critical = html(), html()
        with section("Sensitivity"):
            self._sensitivity = html().props("data-testid=sensitivity")
        with section("Compare"):
            with chips():
                button("Pin this answer", "pin", lambda: self._pin([*self.pins, self.prediction][:MOST_PINS]))
                button("Remove the pins", "unpin", lambda: self._pin([]))
            self._compared = html(_NOT_PINNED).props("data-testid=comparison")

    def _set_theme(self, dark: bool | None) -> None:
        self._theme.value, name = dark, {None: "", True: "dark", False: "light"}[dark]
        ui.run_javascript(f"document.documentElement.className = '{name}'")

    def say(self, text: str) -> None:
        """Show what went wrong, or what was assumed; empty: nothing."""
        self._message.text = printable(text)

    def attempt(self, act: Callable[[], None]) -> None:
        """Do what the user asked for, or say which rule it breaks."""
        try:
            act()
        except StepsightError as error:
            self.say(str(error))

    def ask(self, job: Job, rebuild: bool = False) -> None:
        """Predict a job and show the answer; ``rebuild``: the controls too, for another job."""
        self._show(predict(job, self.space.predictor), rebuild)

    def _show(self, prediction: Prediction, rebuild: bool = False) -> None:
        job, told = prediction.job, prediction.to_dict()
        if job.unit != self.prediction.job.unit:
            self.goal = replace(self.goal, tokens=usual_amount(job))
        plan = training_plan(prediction, self.goal)
        self.prediction = prediction
        self._version += 1
        self.say("")
        self._answer.classes(remove="stale")
        self._title.content = f'{escape(views.title(job))}<br><small class="quiet">{escape(job.name)}</small>'
        self._answer.content, self._said.content = views.answer(told, plan), views.said(told)
        self._time.content, self._memory.content = views.time(told), views.memory(told)
        self._link.props["value"] = f"{self.space.address}&job={job_link(job)}"
        if not rebuild:
            return self._controls.show(job)
        self._control_box.clear()
        with self._control_box:
            self._controls = Controls(job, self._change)
            html("Training", "h2")
            price = str(self.goal.prices.get(job.hardware_name, ""))
            text_input("tokens", f"{job.unit.capitalize()} to train on", partial(self._plan, "tokens"),
                       value=f"{self.goal.tokens:g}")  # fmt: skip
            text_input("price", "Price of a device-hour", partial(self._plan, "price"), value=price)

    def _change(self, field: Field, text: str) -> None:
        try:
            self.ask(changed(self.prediction.job, field.key, field.read(text)))
        except StepsightError as error:
            self._answer.classes(add="stale")  # it is of the last job that keeps the rules
            self.say(f"{words(field.key)} {shown(text)}: {error}")

    def _plan(self, name: str, text: str) -> None:
        hardware = self.prediction.job.hardware_name
        try:
            value = float(text)
            stated = {"tokens": value} if name == "tokens" else {"prices": {**self.goal.prices, hardware: value}}
            self.goal = replace(self.goal, **stated)
            self._show(self.prediction)
        except ValueError as error:
            own = isinstance(error, StepsightError)
            self.say(str(error) if own else f"{name} must be a number > 0, got {text!r:.40}")

    async def _look_closer(self) -> None:
        """Show what takes longer, once the controls rest."""
        version = self._version
        if version != self._resting or version == self._shown:
            self._resting = version
            return
        prediction, plan = self.prediction, training_plan(self.prediction, self.goal)
        self._show_compared()

        def still_wanted(*_: int) -> None:
            if version != self._version:
                raise StoppedError

        def compute() -> tuple[str, views.Facts]:
            facts = job_facts(prediction, self.space.predictor, plan, on_step=still_wanted)
            return timeline_call(prediction.timeline("segment")), facts

        self._controls.show_rules(prediction.job)
        try:
            found = await run.io_bound(compute)
        except StoppedError:
            return
        if found is not None:
            self._shown, (call, facts) = version, found
            ui.run_javascript(call)
            self._over_time.content, self._critical.content = views.memory_over_time(facts), views.critical(facts)
            self._sensitivity.content = views.sensitivity(facts) + views.next_steps(facts) + views.assumptions(facts)

    async def _open(self, name: str) -> None:
        self.say(f"reading {name}")
        await self._read(lambda: self.space.open(name, self.prediction.job.hardware_name))

    async def _upload(self, event: MultiUploadEventArguments) -> None:
        files = {Path(each.name).name: await each.read() for each in event.files}
        self._files.reset()
        await self._read(lambda: self.space.uploaded(files))

    async def _read(self, read: Callable[[], tuple[Opened, str]]) -> None:
        try:
            found = await run.io_bound(read)
        except (StepsightError, OSError) as error:
            return self.say(str(error))
        if found is not None:
            self.attempt(lambda: self.take(*found))

    def take(self, found: Opened, assumed: str = "") -> None:
        """Show what was opened, and what was assumed; a job replaces the one that is shown."""
        self.ask(found, rebuild=True) if isinstance(found, Job) else self.traces.show(found)
        self.say(assumed)

    def _pin(self, answers: list[Prediction]) -> None:
        """Keep answers to compare others with them."""
        self.pins = answers
        self._show_compared()

    def _all(self) -> list[Prediction]:
        """The pinned answers and the present one, if it is not pinned itself."""
        return [*self.pins, *([] if any(each.job == self.prediction.job for each in self.pins) else [self.prediction])]

    def _comparison(self) -> str:
        """Pinned answers and the present one; empty without pins."""
        sides = [predicted_side(each, each.job.name) for each in self._all()]
        return views.comparison(compare_sides(sides)) if len(sides) > 1 else ""

    def _show_compared(self) -> None:
        pinned = f"<p>{len(self.pins)} pinned. Change the job to compare.</p>" if self.pins else _NOT_PINNED
        self._compared.content = self._comparison() or pinned

    async def _export(self) -> None:
        asked, goal = self._all(), self.goal
        facts = await run.io_bound(
            lambda: [job_facts(one, self.space.predictor, training_plan(one, goal)) for one in asked]
        )
        extra = [text for text in (self._comparison(), self.search.view(), self.traces.content) if text]
        if facts is not None:
            ui.download.content(views.job_page(asked, facts, extra), f"{self.prediction.job.model_name}.html")
