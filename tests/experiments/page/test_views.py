"""Pages about jobs: whole, loading nothing, and drawn by a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from stepsight.dataset.job.job import Job
from stepsight.experiments.page.views import job_page
from stepsight.experiments.questions.job_facts import job_facts
from stepsight.experiments.questions.training_plan import training_plan
from stepsight.experiments.search.search import search
from stepsight.experiments.search.settings import Goal
from stepsight.training.prediction.prediction import Prediction, predict

EXAMPLES = Path(__file__).parents[3] / "examples"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tags(HTMLParser):
    """Collects what a page links to, and checks that its tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return predict(Job.from_file(EXAMPLES / "mixtral-8x22b-ep-256.toml"), "roofline")


@pytest.fixture(scope="module")
def facts(prediction: Prediction) -> dict[str, Any]:
    return job_facts(prediction, "roofline", training_plan(prediction, Goal(tokens=1e12)))


def test_the_page_is_whole_and_loads_nothing(prediction: Prediction, facts: dict[str, Any]) -> None:
    page = job_page([prediction], [facts])
    tags = Tags()
    tags.feed(page)
    assert not tags.open and all(link.startswith("#") for link in tags.links)
    assert "@import" not in page and "url(" not in page and "import(" not in page
    for title in ("Where the time goes", "Timeline", "Memory", "Training", "Sensitivity", "Assumptions"):
        assert f"<h2>{title}</h2>" in page


def test_memory_over_time_has_the_peak_of_every_stage(prediction: Prediction, facts: dict[str, Any]) -> None:
    rows = facts["memory_over_time"]
    assert len(rows) == prediction.job.parallel.pp
    for row, stage in zip(rows, prediction.memory.stages, strict=True):
        assert max(row["bytes"]) == pytest.approx(stage.total)
        assert row["seconds"] == sorted(row["seconds"]) and row["seconds"][-1] <= prediction.iteration_time_s


def test_steps_to_try_next_fit_and_are_faster(facts: dict[str, Any]) -> None:
    assert all(step["fits"] and step["tokens_per_s_ratio"] > 1 for step in facts["next_steps"])
    names = [row["name"] for row in facts["tornado"]]
    assert "Bandwidth between nodes, GB/s" in names and "Nodes" in names


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: apt install chromium)")
def test_a_browser_draws_the_page(prediction: Prediction, facts: dict[str, Any], tmp_path: Path) -> None:
    """The script of the timeline sizes the canvas and writes its note, and the picture is not empty."""
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(job_page([prediction], [facts]))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1800"]
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}"]
    subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=60)
    drawn = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], check=True, capture_output=True, timeout=60, text=True
    )
    assert '<p id="timeline-note-0" class="note">Scroll or press' in drawn.stdout
    assert re.search('<canvas id="timeline-0"[^>]* width="', drawn.stdout)
    assert picture.stat().st_size > 30_000


def test_a_search_shows_itself_in_a_notebook() -> None:
    """As a table and as a plot."""
    result = search(EXAMPLES / "gpt3-175b-1024.toml", "roofline", trials=20)
    assert result._repr_html_().count("<tr") == 1 + min(10, len(result.choices))
    axes = result.plot()
    assert axes.get_xlabel().startswith("peak memory") and axes.get_title() == result.proof
    pyplot.close(axes.figure)
