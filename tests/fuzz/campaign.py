"""Run the fuzzing targets for a while: ``python -m tests.fuzz --minutes 10 [TARGET ...]``.

Each target runs in a process of its own with at most 2 GB beyond what Python and the libraries take.  An input that
fails is written to ``fuzz-failures/`` with the seed that makes it again; the exit code is 1 where there is one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.targets import TARGETS, corpus
from tests.fuzz.watch import Hang, answered

FAILURES = Path("fuzz-failures")
MOST_BYTES = 2 * 2**30
# Files of a process: the input that is tried (a target may rename its own), and how many failed.
LAST, FOUND = "last", "failures"
MOST_FAILURES = 5  # of one target; more are likely the same


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--inputs", type=int, default=0, help="of each target, whatever time they take")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    seconds = 60 * options.minutes * options.jobs / len(names)
    print(f"seed {options.seed}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:  # of threads that wait for a process each
        failed = sum(pool.map(lambda name: _campaign(name, options.seed, seconds, options.inputs), names))
    return 1 if failed else 0


def _campaign(name: str, seed: int, seconds: float, most: int) -> int:
    """Number of inputs of a target that failed; one that ends its process is a failure, and a new one goes on."""
    context = multiprocessing.get_context("spawn")
    until, first, failures = time.monotonic() + seconds, 0, 0
    while True:
        with tempfile.TemporaryDirectory(prefix="stepsight-fuzz-") as folder:
            arguments = (name, seed, Path(folder), first, until, most, MOST_FAILURES - failures)
            process = context.Process(target=_run, args=arguments)
            process.start()
            process.join()
            found = Path(folder) / FOUND
            if found.exists():
                return failures + int(found.read_text())
            tried = max((int(path.name) for path in Path(folder).iterdir() if path.is_dir()), default=-1)
            if tried < 0:
                raise RuntimeError(f"the process of {name} ended with {process.exitcode} before its first input")
            kept = _keep(name, f"{seed}-{tried}", (Path(folder) / LAST).read_bytes())
            first, failures = tried + 1, failures + 1
            print(f"FAILED {kept}\nthe process ended with {process.exitcode}", flush=True)


def _keep(name: str, number: str, data: bytes) -> Path:
    """Write an input that failed to where it is looked for."""
    FAILURES.mkdir(exist_ok=True)
    kept = FAILURES / f"{name}-{number}{TARGETS[name].suffix}"
    kept.write_bytes(data)
    return kept


def _run(name: str, seed: int, folder: Path, first: int, until: float, most: int, most_failures: int) -> None:
    """Try inputs of a target; ``folder`` holds the one that is tried, and at the end how many failed."""
    target, seeds = TARGETS[name], corpus(name)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    tried, read, failures, slowest = first, 0, 0, (0.0, "")
    while failures < most_failures and (tried < most if most else time.monotonic() < until):
        number, start = f"{seed}-{tried}", time.process_time()
        rng = random.Random(number)
        data = target.mutate(rng, rng.choice(seeds))
        path = folder / f"{tried}" / f"input{target.suffix}"
        path.parent.mkdir()
        for copy in (path, folder / LAST):
            copy.write_bytes(data)
        try:
            read += answered(lambda path=path: target.ask(path))
        except (Exception, Hang, RecursionError):
            failures += 1
            print(f"FAILED {_keep(name, number, data)}\n{traceback.format_exc()[-1500:]}", flush=True)
        slowest = max(slowest, (time.process_time() - start, number))
        shutil.rmtree(path.parent)
        tried += 1
    print(f"{name:22} {tried:7} inputs, {read} read, {failures} failed, slowest {slowest[0]:.2f} s of a core "
          f"({slowest[1]})", flush=True)  # fmt: skip
    (folder / FOUND).write_text(str(failures))
