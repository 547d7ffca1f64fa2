"""A server for one person's browser: loopback alone, a token in the address, no request of another origin."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from hmac import compare_digest
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepsight.dataset.base.bounded import reading_only
from stepsight.dataset.base.errors import StepsightError

HOST = "127.0.0.1"
MOST_UPLOAD = 4 * 2**20  # bytes of a request: as a configuration file may have
_HEADERS = {
    "Content-Security-Policy": "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer:
    """A listening socket, and the address to open."""

    def __init__(self, port: int) -> None:
        try:
            self._listening = socket.create_server((HOST, port))
        except OSError as error:
            raise StepsightError(f"--port {port} cannot be used: {error.strerror}; --port 0 takes a free one") from None
        self.port = int(self._listening.getsockname()[1])
        self.token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def run(self, app: FastAPI, folders: Sequence[Path], on_ready: Callable[[], Any] | None = None) -> None:
        """Serve until the process is interrupted, and read files of some folders alone."""
        package, uploads = Path(__file__).parents[2], Path(gettempdir())
        guarded = Guard(app, self.port, self.token)
        config = uvicorn.Config(
            guarded, log_level="error", timeout_graceful_shutdown=1, ws_max_size=MOST_UPLOAD, lifespan="on"
        )
        if on_ready is not None:
            on_ready()
        with reading_only([*folders, package, uploads]), suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[self._listening])


class Guard:
    """Refuses requests that the page of this server did not make.

    ``/healthz`` answers everybody on this machine.  All else needs the token: in the address of the first request, and
    in the cookie that its answer sets.  The names in ``Host`` and ``Origin`` must be this server's, so that a page of
    another origin can neither ask nor listen, also where a name of its own leads to this machine.
    """

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app, self._token, self._cookie = app, token, f"stepsight-{port}"
        self._hosts = {f"{HOST}:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        status, text = self._refusal(scope, headers)
        if not status and scope["path"] == "/healthz":
            status, text = 200, "ok"
        if status and scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        if status:
            return await PlainTextResponse(text, status)(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(_HEADERS)
                found.append("Set-Cookie", f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str]:
        """Status and reason; 0: none."""
        origin = headers.get("origin")
        if headers.get("host") not in self._hosts:
            return 403, "this page answers at 127.0.0.1 alone"
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return 403, "a request of another origin is refused"
        if scope["path"] == "/healthz":
            return 0, ""
        given = [*parse_qs(scope["query_string"].decode("latin-1")).get("token", [])]
        given.append(cookie_parser(headers.get("cookie", "")).get(self._cookie, ""))
        if not any(compare_digest(each.encode(), self._token.encode()) for each in given):
            return 403, "open the address that `stepsight page` printed: it has a token"
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_UPLOAD or "transfer-encoding" in headers:
            return 413, f"a file must have at most {MOST_UPLOAD} bytes"
        return 0, ""
