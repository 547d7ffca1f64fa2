"""The server of the page: who may ask, and what it reads."""

import http.client
import json
import socket
from contextlib import closing
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest


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


def test_json_prints_the_address_too(running) -> None:  # type: ignore[no-untyped-def]
    made = type(running)("--json")
    address = json.loads(made.address)["address"]
    assert address.startswith("http://127.0.0.1:") and status(address) == 200
    assert made.stop() == 0
