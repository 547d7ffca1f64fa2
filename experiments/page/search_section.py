"""The section of the page that searches strategies."""

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
from stepsight.experiments.page.controls import button, html, on_choice, section, text_input
from stepsight.experiments.reports.job_texts import written_text
from stepsight.experiments.search.choices import Choice, SearchResult
from stepsight.experiments.search.search import search
from stepsight.experiments.search.settings import REGRET, Goal, Scenarios
from stepsight.training.corrections.intervals import seconds_text

Present = Callable[[], tuple[Job, Goal]]


class _StoppedError(Exception):
    """The user stopped the search."""


class SearchSection:
    """Runs a search, shows its strategies as a plot, and gives the chosen one away as a file."""

    def __init__(self, predictor: Any, present: Present, use: Callable[[Job], None]) -> None:
        self._predictor, self._present, self._use = predictor, present, use
        self._result: SearchResult | None = None
        self._progress, self._stopped, self._chosen = "", False, 0
        with section("Search"):
            html("<p>Find the strategy with the shortest predicted iteration that fits in memory.</p>")
            self._nodes = ""
            text_input("search-nodes", "Numbers of nodes to compare, as 64,128 (empty: the job's own)", self._set_nodes)
            with ui.element("div").classes("chips controls"):
                button("Search", "search", self._search)
                button("Stop", "search-stop", self._stop)
            self._line = ui.label().props("role=status data-testid=search-progress")
            ui.timer(0.2, self._tell)
            self._view = html().props("data-testid=search-result")
            on_choice(self._view, lambda key: self._choose(int(key)))
            self._taking = ui.element("div").classes("chips controls")

    def _set_nodes(self, text: str) -> None:
        self._nodes = text

    def _stop(self) -> None:
        self._stopped = True

    def _tell(self) -> None:
        self._line.text = self._progress

    async def _search(self) -> None:
        self._stopped, self._progress = False, "searching"
        job, goal = self._present()

        def on_trial(number: int, best: float | None) -> None:
            if self._stopped:
                raise _StoppedError
            shortest = "none fits yet" if best is None else f"best {seconds_text(best)}"
            self._progress = f"{number + 1} strategies predicted, {shortest}"

        try:
            words = [word.strip() for word in self._nodes.split(",") if word.strip()]
            if not all(word.isascii() and word.isdigit() and int(word) for word in words):
                raise StepsightError(f"numbers of nodes must be whole numbers > 0, got {self._nodes!r:.60}")
            several = Scenarios(nodes=tuple(map(int, words)))
            asked = replace(goal, objective="training_time") if words else replace(goal, robust=REGRET)
            self._result = await run.io_bound(
                lambda: search(job, self._predictor, goal=asked, scenarios=several, on_trial=on_trial)
            )
            self._progress = ""
            self._choose(0)
        except _StoppedError:
            self._progress = "stopped"
        except StepsightError as error:
            self._progress = printable(str(error))

    def _choices(self) -> list[Choice]:
        return [] if self._result is None else views.timed_choices(self._result)

    def view(self) -> str:
        """The strategies as HTML; empty before a search."""
        return "" if self._result is None else views.search_view(self._result, self._chosen)

    def _choose(self, number: int) -> None:
        """Show one strategy, and what it can be taken as."""
        self._chosen = number
        self._view.content = self.view()
        self._taking.clear()
        choices = self._choices()
        if not choices:
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
        except StepsightError as error:
            self._progress = printable(str(error))
            return
        self._progress = printable(written_text(written, name))
        suffix = {"megatron-script": ".sh", "megatron": ".sh", "torchtitan": ".toml"}.get(name)
        suffix = suffix or (".json" if written.text.lstrip().startswith("{") else ".yaml")
        ui.download.content(written.text, f"{name}{suffix}")
