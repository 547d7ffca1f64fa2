"""The sections of the page that search strategies, and that look into traced runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

from nicegui import run, ui

from stepsight.dataset.base.errors import StepsightError, printable
from stepsight.dataset.configs.documents import job_toml
from stepsight.dataset.configs.formats import write_config, written_formats
from stepsight.dataset.job.job import Job
from stepsight.experiments.page import views
from stepsight.experiments.page.controls import VALUE, button, chips, html, on_choice, section, slider, text_input
from stepsight.experiments.questions.traced_runs import ReplayedRun
from stepsight.experiments.questions.what_if import what_if
from stepsight.experiments.reports.job_texts import written_text
from stepsight.experiments.reports.text_table import words
from stepsight.experiments.search.choices import SearchResult
from stepsight.experiments.search.search import progress_words, search
from stepsight.experiments.search.settings import REGRET, Goal, Scenarios
from stepsight.experiments.tasks.settings import TraceChanges
from stepsight.simulator.replay.causes import breakdown
from stepsight.simulator.replay.changes import COMMUNICATION
from stepsight.training.corrections.intervals import seconds_text
from stepsight.training.prediction.captured_prediction import CapturedPrediction

MOST_KINDS = 3  # of ops, that have a slider
_STEPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times as fast


class StoppedError(Exception):
    """The user stopped what is computed, or changed the job that it is about."""


class SearchSection:
    """Runs a search, shows its strategies as a plot, and gives the chosen one away as a file."""

    def __init__(self, predictor: Any, present: Callable[[], tuple[Job, Goal]], use: Callable[[Job], None]) -> None:
        self._predictor, self._present, self._use = predictor, present, use
        self._result: SearchResult | None = None
        self.progress, self._nodes, self._stopped, self._chosen = "", "", False, 0
        with section("Search"):
            html("<p>Find the strategy with the shortest predicted iteration that fits in memory.</p>")
            label = "Numbers of nodes to compare, as 64,128 (empty: the job's own)"
            text_input("search-nodes", label, partial(setattr, self, "_nodes"))
            with chips():
                button("Search", "search", self._search)
                button("Stop", "search-stop", partial(setattr, self, "_stopped", True))
            ui.label().props("role=status data-testid=search-progress").bind_text_from(self, "progress")
            self._view = html().props("data-testid=search-result")
            on_choice(self._view, lambda key: self._choose(int(key)))
            self._taking = chips()

    async def _search(self) -> None:
        self._stopped, self.progress = False, "searching"
        job, goal = self._present()

        def on_trial(number: int, best: float | None) -> None:
            if self._stopped:
                raise StoppedError
            counted, shortest = progress_words(job, best)
            self.progress = f"{number + 1} {counted} predicted, {shortest}".removesuffix(", ")

        try:
            words = [word.strip() for word in self._nodes.split(",") if word.strip()]
            if not all(word.isascii() and word.isdigit() and int(word) for word in words):
                raise StepsightError(f"numbers of nodes must be whole numbers > 0, got {self._nodes!r:.60}")
            several = Scenarios(nodes=tuple(map(int, words)))
            asked = replace(goal, objective="training_time") if words else replace(goal, robust=REGRET)
            self._result = await run.io_bound(
                lambda: search(job, self._predictor, goal=asked, scenarios=several, on_trial=on_trial)
            )
            self.progress = ""
            self._choose(0)
        except StoppedError:
            self.progress = "stopped"
        except StepsightError as error:
            self.progress = printable(str(error))

    def view(self) -> str:
        """The strategies as HTML; empty before a search."""
        return "" if self._result is None else views.search_view(self._result, self._chosen)

    def _choose(self, number: int) -> None:
        """Show one strategy, and what it can be taken as."""
        self._chosen = number
        self._view.content = self.view()
        self._taking.clear()
        if self._result is None or not (choices := views.timed_choices(self._result)):
            return
        job = choices[number].job
        with self._taking:
            html(f"<b>{escape(job.name)}</b>").props("data-testid=chosen")
            button("Use it here", "use", lambda: self._use(job))
            button("Job file", "take-job", lambda: ui.download.content(job_toml(job), "job.toml"))
            for name in written_formats():
                button(name, f"take-{name}", partial(self._take, job, name))

    def _take(self, job: Job, name: str) -> None:
        """Download a strategy as a framework's configuration or launch script."""
        try:
            written = write_config(job, name)
            ui.download.content(written.text, f"{name}{written.suffix}")
            self.progress = printable(written_text(written, name))
        except StepsightError as error:
            self.progress = printable(str(error))


class TraceSection:
    """Shows where the time of a traced run went, and what changes would gain; ``content``: the run as HTML."""

    def __init__(self) -> None:
        self.content, self._asked = "", TraceChanges()
        with section("Traces"):
            html("<p>Open a collection, a run folder or a captured script above.</p>")
            self._view = html().props("data-testid=trace")
            self._sliders = ui.element("div").classes("controls").props("data-testid=what-if")
            self._changed = html().props("data-testid=what-if-answer aria-live=polite")

    def show(self, found: ReplayedRun | CapturedPrediction) -> None:
        """Show a traced run with its what-if sliders, or the prediction of a captured script."""
        self._sliders.clear()
        self._changed.content = ""
        if isinstance(found, CapturedPrediction):
            told = found.to_dict()
            self.content = f"<h1>{escape(told['job'])}</h1>{views.answer(told)}{views.said(told)}{views.time(told)}"
        else:
            split = breakdown(found.graphs).to_dict()
            self.content = views.trace_view(found.to_dict(), split)
            self._add_sliders(found, [*list(split["kinds"])[:MOST_KINDS], COMMUNICATION])
        self._view.content = self.content

    def _add_sliders(self, found: ReplayedRun, kinds: list[str]) -> None:
        self._asked = TraceChanges()
        with self._sliders:
            html("What if", "h2")
            for kind in dict.fromkeys(kinds):
                with ui.element("div").classes("field"):
                    label = html(f"{escape(words(kind))}: as traced", "label")
                    made = slider(f"faster-{kind}", words(kind), len(_STEPS)).props("value=2")

                async def moved(event: Any, kind: str = kind, label: ui.html = label) -> None:
                    factor = _STEPS[int(event.args)]
                    kept = {of: each for of, each in self._asked.faster.items() if of != kind}
                    self._asked = replace(self._asked, faster={**kept, **({kind: factor} if factor != 1.0 else {})})
                    label.content = f"{escape(words(kind))}: {factor:g} times as fast"
                    await self._answer(found)

                made.on("input", moved, throttle=0.2, js_handler=VALUE)
            with ui.element("div").classes("chips"):
                for name in ("no_host", "remove_straggler"):
                    button(words(name), name.replace("_", "-"), partial(self._answer, found, name))

    async def _answer(self, found: ReplayedRun, switched: str = "") -> None:
        """Replay the step with all changes; ``switched``: one to turn on or off."""
        turned: dict[str, Any] = {switched: not getattr(self._asked, switched)} if switched else {}
        self._changed.content, self._asked = "", replace(self._asked, **turned)
        asked = self._asked
        told = None if asked == TraceChanges() else await run.io_bound(what_if, found, asked)
        if told is not None and asked == self._asked:
            every = {"change": "all of them", "step_s": told["changed_s"], "speedup": told["speedup"]}
            rows = [[each["change"], seconds_text(each["step_s"]), f"{each['speedup']:.2f}"]
                    for each in (*told["changes"], every)]  # fmt: skip
            self._changed.content = views.html_table(["change", "step", "speed-up"], rows)
