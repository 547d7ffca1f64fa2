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
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.targets import TARGETS, corpus
from tests.fuzz.watch import Hang, answered

FAILURES = Path("fuzz-failures")
MOST_BYTES = 2 * 2**30
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
    work = [(name, options.seed, seconds, options.inputs) for name in names]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        failed = sum(pool.imap_unordered(_run, work))
    return 1 if failed else 0


def _run(work: tuple[str, int, float, int]) -> int:
    """Number of inputs of a target that failed."""
    name, seed, seconds, most = work
    target, seeds = TARGETS[name], corpus(name)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    began, tried, read, failures, slowest = time.monotonic(), 0, 0, 0, 0.0
    with tempfile.TemporaryDirectory(prefix="stepsight-fuzz-") as folder:
        while failures < MOST_FAILURES and (tried < most if most else time.monotonic() - began < seconds):
            number, start = f"{seed}-{tried}", time.monotonic()
            rng = random.Random(number)
            data = target.mutate(rng, rng.choice(seeds))
            path = Path(folder) / f"{tried}" / f"input{target.suffix}"
            path.parent.mkdir()
            path.write_bytes(data)
            try:
                read += answered(lambda path=path: target.ask(path))
            except (Exception, Hang, RecursionError):
                failures += 1
                FAILURES.mkdir(exist_ok=True)
                kept = FAILURES / f"{name}-{number}{target.suffix}"
                kept.write_bytes(data)
                print(f"FAILED {kept}\n{traceback.format_exc()[-1500:]}", flush=True)
            slowest = max(slowest, time.monotonic() - start)
            tried += 1
    print(f"{name:22} {tried:7} inputs, {read} read, {failures} failed, slowest {slowest:.2f} s", flush=True)
    sys.stdout.flush()
    return failures
