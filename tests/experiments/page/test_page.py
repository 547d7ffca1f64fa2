"""The page as a person uses it, in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).parents[3]
SLOW_MS = 60_000


def text(tab: Any, name: str) -> str:
    return str(tab.get_by_test_id(name).inner_text())


def change(tab: Any, name: str, key: str) -> str:
    """Press a key on a slider; the iteration time once it has changed."""
    before = text(tab, "iteration-time")
    tab.get_by_test_id(name).press(key)
    changed = "old => document.querySelector('[data-testid=iteration-time]').textContent !== old"
    tab.wait_for_function(changed, arg=before)
    return text(tab, "iteration-time")


def open_file(tab: Any, name: str) -> None:
    tab.get_by_test_id("file").fill(name)
    tab.get_by_test_id("file").press("Enter")


def message(tab: Any, pattern: str) -> None:
    tab.get_by_test_id("message").filter(has_text=re.compile(pattern)).wait_for()


def test_the_page_shows_the_answer_and_its_details(tab: Any) -> None:
    assert re.fullmatch(r"[\d.]+ s", text(tab, "iteration-time"))
    assert "to" in text(tab, "interval") and "GB" in text(tab, "memory")
    assert tab.get_by_test_id("timeline").get_attribute("aria-label")
    tab.locator("[data-testid=sensitivity] svg").first.wait_for(timeout=SLOW_MS)
    assert "halved" in text(tab, "sensitivity")


def test_the_answer_follows_a_slider_that_is_dragged(tab: Any) -> None:
    """The mouse is still down when the figures have changed."""
    box = tab.get_by_test_id("micro-batch").bounding_box()
    tab.get_by_test_id("micro-batch").scroll_into_view_if_needed()
    box = tab.get_by_test_id("micro-batch").bounding_box()
    before, middle = text(tab, "iteration-time"), box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 8, middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.34 * box["width"], middle, steps=6)
    changed = "old => document.querySelector('[data-testid=iteration-time]').textContent !== old"
    tab.wait_for_function(changed, arg=before)
    tab.mouse.up()
    assert tab.get_by_test_id("micro-batch-value").input_value() in ("2", "4", "8")


def test_a_value_that_breaks_a_rule_is_greyed_with_the_rule_and_changes_nothing(tab: Any) -> None:
    illegal = tab.locator("[data-testid=pp-choices] .illegal").last
    illegal.wait_for()
    assert illegal.inner_text() == "128" and "pp" in illegal.get_attribute("title")
    before = text(tab, "iteration-time")
    tab.get_by_test_id("pp").press("End")
    message(tab, "Pipeline stages 128:")
    assert text(tab, "iteration-time") == before
    assert change(tab, "tp", "ArrowLeft") != before
    assert text(tab, "message") == ""


def test_pinned_answers_are_compared_by_cause(tab: Any) -> None:
    tab.get_by_test_id("pin").click()
    change(tab, "tp", "ArrowLeft")
    compared = tab.get_by_test_id("comparison")
    compared.filter(has_text="Tensor parallel").wait_for()
    assert "Pipeline bubble" in compared.inner_text() and "Differences by cause" in compared.inner_text()


def test_a_search_is_shown_and_its_strategies_can_be_taken(tab: Any, tmp_path: Path) -> None:
    open_file(tab, "examples/bert-large-ddp-16.toml")
    tab.get_by_test_id("job").filter(has_text="bert-large").wait_for()
    tab.get_by_test_id("search").click()
    points = tab.locator("[data-testid=front] circle")
    points.first.wait_for(timeout=SLOW_MS)
    best = text(tab, "chosen")
    points.nth(1).press("Enter")
    tab.get_by_test_id("chosen").filter(has_not_text=best).wait_for()
    with tab.expect_download() as taken:
        tab.get_by_test_id("take-job").click()
    assert "[parallel]" in Path(taken.value.path()).read_text()
    wanted = text(tab, "chosen")
    tab.get_by_test_id("use").click()
    tab.get_by_test_id("job").filter(has_text=wanted).wait_for()


def test_everything_is_saved_as_one_file_that_loads_nothing(tab: Any, browser: Any, tmp_path: Path) -> None:
    tab.get_by_test_id("pin").click()
    change(tab, "tp", "ArrowLeft")
    with tab.expect_download(timeout=SLOW_MS) as saved:
        tab.get_by_test_id("export").click()
    path = tmp_path / "saved.html"
    saved.value.save_as(path)
    page, asked = browser.new_page(), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert page.get_by_test_id("timeline").count() == 2 and "Comparison" in page.content()
    assert asked == [path.as_uri()]
    page.close()


def test_a_link_opens_the_job_in_it(tab: Any) -> None:
    changed = change(tab, "tp", "ArrowLeft")
    tab.goto(tab.get_by_test_id("link").input_value())
    tab.get_by_test_id("iteration-time").filter(has_text=changed).wait_for()
    with tab.expect_download() as saved:
        tab.get_by_test_id("save-job").click()
    assert "tp = 4" in Path(saved.value.path()).read_text()
    tab.goto(tab.get_by_test_id("link").input_value()[:-30])
    message(tab, "the address must hold a whole job")


def test_two_tabs_have_their_own_jobs(tab: Any, running: Any) -> None:
    other = tab.context.new_page()
    other.goto(running.address)
    before = text(other, "iteration-time")
    assert change(tab, "tp", "ArrowLeft") != before
    assert text(other, "iteration-time") == before


def test_files_that_cannot_be_opened_say_why(tab: Any, tmp_path: Path) -> None:
    """Outside of the folder, broken, and with names that would be HTML."""
    before = text(tab, "iteration-time")
    open_file(tab, "../../etc/passwd")
    message(tab, "must be in")
    broken = tmp_path / "<img src=x onerror=alert(1)>.toml"
    broken.write_text("[model\n")
    tab.locator("input[type=file]").set_input_files(broken)
    message(tab, "is not valid TOML")
    assert tab.locator("img").count() == 0 and text(tab, "iteration-time") == before
    outside = tmp_path / "outside.toml"
    job = (ROOT / "examples" / "bert-large-ddp-16.toml").read_text()
    outside.write_text(re.sub(r'hardware = "[^"]*"', 'hardware = "/etc/secret.toml"', job))
    tab.locator("input[type=file]").set_input_files(outside)
    message(tab, "secret.toml")


def test_names_are_escaped(tab: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    job = (ROOT / "examples" / "local-gpt-tp2.toml").read_text()
    path.write_text(job.replace("[model]", '[model]\nname = "<img src=x onerror=alert(1)>"', 1))
    tab.locator("input[type=file]").set_input_files(path)
    tab.get_by_test_id("job").filter(has_text="<img src=x").wait_for()
    tab.locator("[data-testid=sensitivity] svg").first.wait_for(timeout=SLOW_MS)
    assert tab.locator("img").count() == 0


def test_a_job_of_100_000_devices(tab: Any) -> None:
    open_file(tab, "examples/gpt3-175b-100k.toml")
    tab.get_by_test_id("job").filter(has_text="100,096").wait_for()
    assert change(tab, "micro-batch", "ArrowRight").endswith(" s")


def test_a_traced_run_has_causes_and_sliders(tab: Any) -> None:
    run = sorted((ROOT / "examples" / "collection" / "runs").glob("*tp2sp*"))[0]
    open_file(tab, str(run.relative_to(ROOT)))
    tab.locator("[data-testid=trace] h1").wait_for(timeout=SLOW_MS)
    assert "Exposed communication" in text(tab, "trace") and "Causes" in text(tab, "trace")
    tab.locator("[data-testid^=faster-]").first.press("ArrowRight")
    tab.get_by_test_id("what-if-answer").filter(has_text="times as fast").wait_for(timeout=SLOW_MS)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_has_a_light_and_a_dark_theme(tab: Any, theme: str) -> None:
    tab.get_by_test_id(f"theme-{theme}").click()
    tab.wait_for_function("name => document.documentElement.className.includes(name)", arg=theme)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (theme == "light")


def status(address: str, **headers: str) -> int:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(address, headers=names), timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def test_the_first_line_is_the_address_and_the_server_is_healthy(running) -> None:  # type: ignore[no-untyped-def]
    assert running.origin.startswith("http://127.0.0.1:") and len(running.token) >= 32
    assert status(f"{running.origin}/healthz") == 200


def test_only_loopback_listens(running) -> None:  # type: ignore[no-untyped-def]
    """A server on all addresses would answer at 127.0.0.2 too."""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(running.origin.rpartition(":")[2])), timeout=30)


def test_the_token_opens_the_page_and_nothing_else_does(running) -> None:  # type: ignore[no-untyped-def]
    assert status(running.address) == 200
    assert status(f"{running.origin}/") == 403
    assert status(f"{running.origin}/?token=guessed") == 403
    with urlopen(running.address, timeout=60) as answer:
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert status(f"{running.origin}/", Cookie=cookie.partition(";")[0]) == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}], ids=str
)
def test_a_foreign_origin_is_refused(running, headers: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """Also where a name of its own leads to this machine."""
    assert status(running.address, **headers) == 403
    assert status(running.address.replace("/?", "/_nicegui_ws/socket.io/?EIO=4&transport=polling&"), **headers) == 403


def test_a_request_that_is_too_large_is_refused(running) -> None:  # type: ignore[no-untyped-def]
    port = int(running.origin.rpartition(":")[2])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as link:
        link.putrequest("POST", f"/?token={running.token}")
        link.putheader("Content-Length", str(10**9))
        link.endheaders()
        with link.getresponse() as answer:
            assert answer.status == 413


def test_nothing_prints_the_token(running) -> None:  # type: ignore[no-untyped-def]
    """Neither of an address that does not exist, nor of a page with a broken job."""
    made = type(running)("-p", "roofline")
    for path in ("/nothing", "/_nicegui/nothing", "/?job=broken"):
        status(f"{made.origin}{path}{'&' if '?' in path else '?'}token={made.token}")
    made.process.send_signal(2)
    printed, warned = made.process.communicate(timeout=60)
    assert made.token not in printed + warned


def test_json_prints_the_address_too(running) -> None:  # type: ignore[no-untyped-def]
    made = type(running)("--json")
    address = json.loads(made.address)["address"]
    assert address.startswith("http://127.0.0.1:") and status(address) == 200
    assert made.stop() == 0
