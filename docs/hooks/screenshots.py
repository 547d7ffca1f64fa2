"""Take the pictures of ``stepsight page`` for the documentation: ``python docs/hooks/screenshots.py``.

Without Chromium or Playwright the pictures stay as they are.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT, SLOW_MS = 1440, 900, 300_000
RUN = "examples/collection/runs/gpt-3L-320h-tp2sp-pp1-dp1-mb2x1-s128-v2048-f1280"
_TOP = "name => document.getElementById(name).scrollIntoView()"


def main() -> None:
    """Take all pictures."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sync_playwright = None
    if BROWSER is None or sync_playwright is None:
        print("screenshots: skipped, they need Chromium (Debian: apt install chromium) and playwright")
        return
    command = [sys.executable, "-m", "stepsight", "page", "--no-browser", "examples/gpt3-175b-1024.toml"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
                for name, act in STATES.items():
                    scheme = "dark" if name == "traces" else "light"
                    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
                    page.set_default_timeout(SLOW_MS)
                    page.goto(address)
                    page.locator("[data-testid=sensitivity] svg").first.wait_for()
                    act(page)
                    _save(page.screenshot(), IMAGES / f"page-{name}.png")
                    page.close()
                browser.close()
        finally:
            server.send_signal(2)


def _save(picture: bytes, path: Path) -> None:
    """Write a picture with a palette, which is a third of the bytes."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)


def _ask(page: Any) -> None:
    page.get_by_test_id("price").fill("1.8")
    page.get_by_test_id("price").press("Enter")
    page.get_by_test_id("cost").filter(has_not_text="no price").wait_for()
    page.evaluate("scrollTo(0, 0); document.querySelector('.controls').scrollTop = 0")


def _timeline(page: Any) -> None:
    page.evaluate(_TOP, "section-timeline")
    line = page.get_by_test_id("timeline")
    for _ in range(14):
        line.hover(position={"x": 180, "y": 20})
        page.mouse.wheel(0, -100)
    line.hover(position={"x": 807, "y": 51})


def _compare(page: Any) -> None:
    page.get_by_test_id("pin").click()
    page.locator("[data-testid=schedule-choices] [data-value=zb-h1]").click()
    page.get_by_test_id("comparison").filter(has_text="Pipeline schedule").wait_for()
    page.evaluate(_TOP, "section-compare")


def _search(page: Any) -> None:
    page.get_by_test_id("search").click()
    page.locator("[data-testid=front] svg").wait_for()
    page.evaluate(_TOP, "section-search")


def _traces(page: Any) -> None:
    page.get_by_test_id("file").fill(RUN)
    page.get_by_test_id("file").press("Enter")
    page.locator("[data-testid=trace] h1").wait_for()
    page.evaluate(_TOP, "section-traces")


STATES: dict[str, Callable[[Any], None]] = {
    "ask": _ask,
    "timeline": _timeline,
    "sensitivity": lambda page: page.evaluate(_TOP, "section-sensitivity"),
    "compare": _compare,
    "search": _search,
    "traces": _traces,
}

if __name__ == "__main__":
    main()
