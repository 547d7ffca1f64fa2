"""What serves the page: the folder that it reads, jobs as links, and a socket of this machine with a token.

It imports no library of pages: the address is printed, and the browser starts, while those are imported.
"""

from __future__ import annotations

import base64
import logging
import secrets
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from stepsight.dataset.base.bounded import MOST_TABLES, reading_only
from stepsight.dataset.base.errors import JobError, StepsightError
from stepsight.dataset.base.files import named_path
from stepsight.dataset.job.job import Job

if TYPE_CHECKING:
    from stepsight.experiments.questions.traced_runs import ReplayedRun
    from stepsight.training.prediction.captured_prediction import CapturedPrediction

    Opened = Job | CapturedPrediction | ReplayedRun

_SUFFIXES = (".toml", ".json", ".yaml", ".yml", ".sh", ".py")
MOST_FILES, DEEPEST = 200, 3  # that are offered, and folders within each other
MOST_DROPPED = 8  # files that are dropped at once
TOO_LARGE = f"a dropped file must have at most {MOST_TABLES / 1e6:.2f} MB, and {MOST_DROPPED} files can be dropped"


@dataclass(frozen=True)
class Workspace:
    """The folder that a page reads, and what it starts with."""

    root: Path  # the only folder whose files are read
    hardware: str = ""  # for configurations, which do not state it; empty: the usual one
    predictor: Any = None  # as in predict
    address: str = ""  # of the page, without a job
    opened: tuple[Opened, ...] = ()  # what the user named: the first job is shown, other jobs are pinned

    def names(self) -> list[str]:
        """Files and folders that may be opened, by their paths within the folder."""
        return [str(path.relative_to(self.root)) for path in sorted(self._offered(self.root, 1))[:MOST_FILES]]

    def _offered(self, folder: Path, depth: int) -> Iterator[Path]:
        from stepsight.dataset.capture.captured import MANIFEST

        for path in folder.glob("[!.]*"):
            whole = (path / MANIFEST).is_file() or (path / "runs").is_dir()
            if whole or (path.suffix in _SUFFIXES and path.is_file()):
                yield path
            elif path.is_dir() and depth < DEEPEST and not path.is_symlink():
                yield from self._offered(path, depth + 1)

    def open(self, name: str, hardware: str = "") -> tuple[Opened, str]:
        """Open a job, a configuration, a captured script (on ``hardware`` where the user names none) or a traced run
        within the folder, and tell what was assumed.
        """
        path = (self.root / named_path(name)).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise StepsightError(f"a file must be in {self.root}, where the page was started, got {name!r:.80}")
        if not path.is_dir():
            return self._read([path], self.root)
        from stepsight.dataset.capture.captured import MANIFEST, read_captured

        if (path / MANIFEST).is_file():
            from stepsight.training.prediction.captured_prediction import predict_captured

            return predict_captured(read_captured(path), self.hardware or hardware, "", self.predictor), ""
        from stepsight.experiments.questions.traced_runs import ReplayedRun, one_run

        return ReplayedRun.of(one_run(path, "the page", traced=True)), ""

    def _read(self, paths: Sequence[Path], folder: Path) -> tuple[Job, str]:
        """Read a job from a job file, or from the configurations of one run; errors name files within the folder."""
        from stepsight.dataset.configs.drafts import Given
        from stepsight.dataset.configs.formats import is_job_file, read_configs

        try:
            if len(paths) == 1 and is_job_file(paths[0]):
                return Job.from_file(paths[0]), ""
            found = read_configs(paths, Given(values={"cluster.hardware": self.hardware} if self.hardware else {}))
            assumed = ", ".join(f"{key} = {value}" for key, value in found.assumed.items())
            return found.job, f"read as {' and '.join(found.formats)}; assumed: {assumed or 'nothing'}"
        except (StepsightError, OSError) as error:
            raise StepsightError(str(error).replace(f"{folder}/", "")) from None

    def uploaded(self, files: Mapping[str, bytes]) -> tuple[Job, str]:
        """Read a job from the content of files by name."""
        if len(files) > MOST_DROPPED or any(len(content) > MOST_TABLES for content in files.values()):
            raise StepsightError(TOO_LARGE)
        with TemporaryDirectory(prefix="stepsight-page-") as folder:
            paths = [Path(folder) / named_path(Path(name).name or "file") for name in files]
            for path, content in zip(paths, files.values(), strict=True):
                path.write_bytes(content)
            return self._read(paths, Path(folder))


def job_link(job: Job) -> str:
    """The job as text for an address."""
    from stepsight.dataset.configs.documents import job_toml

    return base64.urlsafe_b64encode(zlib.compress(job_toml(job).encode(), 9)).decode()


def linked_job(space: Workspace, text: str) -> Job:
    """The job of ``job_link``."""
    try:
        unpack = zlib.decompressobj()
        content = unpack.decompress(base64.urlsafe_b64decode(text), MOST_TABLES)
        if unpack.unconsumed_tail or not unpack.eof:
            raise ValueError("it is cut off or too long")
    except (ValueError, zlib.error) as error:
        raise JobError(f"the address must hold a whole job, got {text!r:.40}: {error}") from None
    return space.uploaded({"link.toml": content})[0]


HOST = "127.0.0.1"
MOST_REQUEST = MOST_DROPPED * (MOST_TABLES + 2**10)  # bytes: dropped files and the names between them
_HEADERS = {
    "Content-Security-Policy": "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_Message = MutableMapping[str, Any]  # of ASGI: a scope, or what is received or sent
_Call = Callable[..., Awaitable[None]]


class PageServer:
    """A listening socket, and the address to open."""

    def __init__(self, port: int) -> None:
        try:
            self._listening = socket.create_server((HOST, port))
        except OSError as error:
            raise StepsightError(f"--port {port} cannot be used: {error.strerror}; --port 0 takes a free one") from None
        self.port, self.token = int(self._listening.getsockname()[1]), secrets.token_urlsafe(24)
        self.address = f"http://{HOST}:{self.port}/?token={self.token}"

    def run(self, app: Any, folders: Sequence[Path]) -> None:
        """Serve until the process is interrupted, and read files of some folders alone."""
        import uvicorn

        logging.getLogger("nicegui").setLevel(logging.ERROR)  # else it prints each address that it does not know
        config = uvicorn.Config(
            Guard(app, self.port, self.token), log_level="error", timeout_graceful_shutdown=1, ws_max_size=MOST_REQUEST
        )
        with reading_only([*folders, Path(__file__).parents[2], Path(gettempdir())]), suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[self._listening])


class Guard:
    """Refuses requests that the page of this server did not make.

    ``/healthz`` answers everybody on this machine.  All else needs the token: in the address of the first request, and
    in the cookie that its answer sets.  The names in ``Host`` and ``Origin`` must be this server's, so that a page of
    another origin can neither ask nor listen, also where a name of its own leads to this machine.  The application does
    not see the token, so no message of it can hold it.
    """

    def __init__(self, app: _Call, port: int, token: str) -> None:
        self._app, self._token, self._cookie = app, token, f"stepsight-{port}"
        self._hosts = {f"{HOST}:{port}", f"localhost:{port}"}

    async def __call__(self, scope: _Message, receive: _Call, send: _Call) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        status, text = self._answer(scope)
        if status and scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        if status:
            plain = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": plain})
            return await send({"type": "http.response.body", "body": text.encode()})
        query = urlencode([(name, value) for name, value in _query(scope) if name != "token"])
        more = {**_HEADERS, "Set-Cookie": f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"}

        async def send_with_headers(message: _Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message["headers"] if pair[0].decode("latin-1").title() not in _HEADERS]
                message["headers"] = own + [(name.encode(), value.encode()) for name, value in more.items()]
            await send(message)

        await self._app({**scope, "query_string": query.encode()}, receive, send_with_headers)

    def _answer(self, scope: _Message) -> tuple[int, str]:
        """Status and text of what the application does not answer; 0: it does."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        if headers.get("host") not in self._hosts:
            return 403, "this page answers at 127.0.0.1 alone"
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return 403, "a request of another origin is refused"
        if scope["path"] == "/healthz":
            return 200, "ok"
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        given = [cookies.get(self._cookie, ""), *(value for name, value in _query(scope) if name == "token")]
        if not any(compare_digest(each.encode(), self._token.encode()) for each in given):
            return 403, "open the address that `stepsight page` printed: it has a token"
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_REQUEST or "transfer-encoding" in headers:
            return 413, TOO_LARGE
        return 0, ""


def _query(scope: _Message) -> list[tuple[str, str]]:
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
