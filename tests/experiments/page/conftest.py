"""A page that runs, and a browser that drives it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "needs Chromium (Debian: apt install chromium)"


class RunningPage:
    """``stepsight page`` as a user starts it."""

    def __init__(self, *arguments: str) -> None:
        pytest.importorskip("nicegui", reason="needs the extra [page]")
        command = [sys.executable, "-m", "stepsight", "page", "--port", "0", "--no-browser", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.origin, _, self.token = self.address.partition("/?token=")

    def stop(self) -> int:
        """Press Ctrl-C; the exit code."""
        with self.process:
            self.process.send_signal(2)
            return self.process.wait(30)


@pytest.fixture(scope="package")
def running() -> Iterator[RunningPage]:
    page = RunningPage("-p", "roofline", "examples/gpt3-175b-1024.toml")
    yield page
    assert page.stop() == 0


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless Chromium; a test that takes it skips where there is none."""
    if BROWSER is None:
        pytest.skip(NO_BROWSER)
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def tab(running: RunningPage, browser: Any) -> Iterator[Any]:
    """A tab that shows the page; its scripts must not fail, and it must ask no other server."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    made, errors, asked = context.new_page(), [], []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on("request", lambda request: asked.append(request.url))
    made.goto(running.address)
    made.get_by_test_id("iteration-time").wait_for()
    yield made
    context.close()
    assert errors == []
    assert [url for url in asked if not url.startswith((running.origin, "blob:", "data:"))] == []
