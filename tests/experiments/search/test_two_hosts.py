"""Searches on two hosts share a study in a PostgreSQL database: hosts are namespaces, joined by a bridge."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

from stepsight.dataset.harness.box.namespaces import check_possible
from stepsight.dataset.harness.plan_error import HarnessError
from tests.experiments.search.postgres_server import running_postgres

pytestmark = pytest.mark.storm

SUBNET, SERVER = "10.78.0", "10.78.0.1"
HOSTS = ("one", "two")
JOB = """
[model]
family = "gpt"
layers = 24
hidden = 1024
heads = 16
vocab = 51200
seq_len = 1024
[parallel]
dp = 16
[batch]
micro_batch = 1
global_batch = 64
[cluster]
hardware = "a100-sxm-80gb"
nodes = 2
devices_per_node = 8
"""


def ip(words: str, *, check: bool = True) -> None:
    subprocess.run(["ip", *words.split()], check=check, capture_output=not check)


@dataclass(frozen=True)
class Network:
    """Two hosts and a server in networks of their own; a host has its own name and its own processes too."""

    tag: str
    out: Path
    url: str = ""

    def name(self, host: str) -> str:
        return f"{self.tag}-{host}"

    def start(self, host: str, *options: str) -> subprocess.Popen[bytes]:
        """Search on a host; the answer goes to ``<host>.json``."""
        command = [sys.executable, "-m", "stepsight", "search", str(self.out / "job.toml"), "--json"]
        command += ["--sampler", "random", "--storage", self.url, "--study", "shared", *options]
        shell = f'hostname {host}; exec "$@" > {self.out}/{host}.json 2> {self.out}/{host}.err'
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", shell, host]
        return subprocess.Popen(["ip", "netns", "exec", self.name(host), *apart, *command])

    def answer(self, host: str) -> dict[str, Any]:
        errors = (self.out / f"{host}.err").read_text()
        assert (self.out / f"{host}.json").stat().st_size, errors[-2000:]
        found: dict[str, Any] = json.loads((self.out / f"{host}.json").read_text())
        return found


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Hosts that reach a database over TCP; skips where there can be none."""
    try:
        check_possible({})
    except HarnessError as error:
        pytest.skip(f"no network namespaces here: {error}")
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("no unshare and setpriv here (apt-get install util-linux)")
    made = Network(f"ss{os.getpid()}", tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    middle = made.name("db")
    try:
        ip(f"netns add {middle}")
        for command in ("add switch type bridge", "set switch up", "set lo up"):
            ip(f"-n {middle} link {command}")
        ip(f"-n {middle} addr add {SERVER}/24 dev switch")
        for number, host in enumerate(HOSTS, start=2):
            ip(f"netns add {made.name(host)}")
            ip(f"-n {middle} link add port-{host} type veth peer name eth0 netns {made.name(host)}")
            ip(f"-n {middle} link set port-{host} master switch up")
            ip(f"-n {made.name(host)} addr add {SUBNET}.{number}/24 dev eth0")
            ip(f"-n {made.name(host)} link set eth0 up")
        with running_postgres(SERVER, f"{SUBNET}.0/24", ("ip", "netns", "exec", middle)) as folder:
            made = Network(made.tag, tmp_path, f"postgresql+psycopg://postgres@{SERVER}/postgres")
            optuna.storages.RDBStorage(_local(folder)).engine.dispose()  # makes the tables
            yield made
    finally:
        for host in (*HOSTS, "db"):
            ip(f"netns del {made.name(host)}", check=False)


def _local(folder: Path) -> str:
    return f"postgresql+psycopg://postgres@/postgres?host={folder}"


@pytest.fixture
def database(network: Network) -> Iterator[optuna.storages.RDBStorage]:
    """The same database, reached from here through its socket."""
    (folder,) = Path("/tmp").glob("pg*/.s.PGSQL.5432")
    storage = optuna.storages.RDBStorage(_local(folder.parent))
    yield storage
    storage.remove_session()
    storage.engine.dispose()


def finished(database: optuna.storages.RDBStorage) -> list[Any]:
    """Strategies that were evaluated."""
    database.remove_session()
    studies = {study.study_name: study._study_id for study in database.get_all_studies()}
    trials = database.get_all_trials(studies["shared"], deepcopy=False) if studies else []
    return [trial.params for trial in trials if trial.state.name in ("COMPLETE", "PRUNED")]


def workers(database: optuna.storages.RDBStorage) -> dict[str, int]:
    """How many strategies each host evaluated."""
    (study,) = database.get_all_studies()
    claims = database.get_study_system_attrs(study._study_id)
    return {claim[0].split("/")[0]: claim[1] for key, claim in claims.items() if key.startswith("claimed")}


def once(database: optuna.storages.RDBStorage, total: int) -> None:
    """Every strategy was evaluated once."""
    counts = Counter(json.dumps(params, sort_keys=True) for params in finished(database))
    assert len(counts) == total and set(counts.values()) == {1}


def test_two_hosts_share_a_study(network: Network, database: optuna.storages.RDBStorage) -> None:
    """Both evaluate a part, each strategy once, and both answer with the same total and the same best strategy."""
    total = 240
    searches = [network.start(host, "--trials", str(total)) for host in HOSTS]
    assert [search.wait(timeout=600) for search in searches] == [0, 0]
    one, two = map(network.answer, HOSTS)
    assert one["evaluated"] == two["evaluated"] == total
    assert one["best"] == two["best"]
    once(database, total)
    shares = workers(database)
    assert set(shares) == set(HOSTS) and sum(shares.values()) == total and min(shares.values()) > 0


@pytest.mark.parametrize("switched_off", [False, True])
def test_one_host_is_killed(network: Network, database: optuna.storages.RDBStorage, switched_off: bool) -> None:
    """The other finishes, whether the database hears of the end or the host says nothing more, as without power."""
    total = 240
    searches = {host: network.start(host, "--trials", str(total)) for host in HOSTS}
    deadline = time.monotonic() + 300
    while len(finished(database)) < total // 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    if switched_off:
        ip(f"-n {network.name('db')} link set port-one down")
    searches["one"].kill()  # and with it, by --kill-child, all processes of the host
    searches["one"].wait()
    assert len(finished(database)) < total
    assert searches["two"].wait(timeout=600) == 0
    assert network.answer("two")["evaluated"] == total
    once(database, total)
