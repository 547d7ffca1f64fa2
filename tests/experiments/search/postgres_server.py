"""A PostgreSQL server of a test's own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def postgres_programs() -> Path | None:
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(found) if (folder / "initdb").exists()), None)


@contextmanager
def running_postgres(listen: str = "", subnet: str = "", inside: Sequence[str] = ()) -> Iterator[Path]:
    """Run a server, and yield the folder of its socket; skip the test where there is none.

    Args:
        listen: Address on which it listens besides.
        subnet: Who may connect there.
        inside: What its command line begins with.
    """
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server here (apt-get install postgresql)")
    pytest.importorskip("psycopg", reason="no driver for PostgreSQL here (pip install 'psycopg[binary]')")
    owner = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # short: a socket's path has 107 characters
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    rights: dict[str, Any] = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    identity = rights if os.geteuid() == 0 else {}
    data = folder / "data"
    options = ["-A", "trust", "-U", "postgres", "--no-sync", "-D", str(data)]
    try:
        subprocess.run([programs / "initdb", *options], check=True, capture_output=True, cwd=folder, **identity)
        if subnet:
            with (data / "pg_hba.conf").open("a") as rules:
                rules.write(f"host all all {subnet} trust\n")
        command = [
            programs / "postgres",
            "-D",
            data,
            "-k",
            folder,
            "-c",
            f"listen_addresses={listen}",
            "-c",
            "fsync=off",
        ]
        if inside:  # entering a network takes root, so the server becomes its owner afterwards
            command = [
                *inside,
                "setpriv",
                f"--reuid={owner.pw_uid}",
                f"--regid={owner.pw_gid}",
                "--clear-groups",
                *command,
            ]
            identity = {}
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(command, stderr=log, cwd=folder, **identity)
        try:
            deadline = time.monotonic() + 60
            ready = [programs / "pg_isready", "-q", "-h", folder]
            while subprocess.run(ready, check=False).returncode and time.monotonic() < deadline:
                time.sleep(0.1)
            yield folder
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:  # it waits for a client that is out of reach
                server.send_signal(signal.SIGQUIT)
                server.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
