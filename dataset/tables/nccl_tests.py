"""nccl-tests: its logs as they are printed, and the same parsed to CSV; microseconds, sizes in bytes.

``size`` is the gathered output of an all-gather, the whole input of a reduce-scatter, one rank's input of an
all-to-all: what ``Collective.num_bytes`` says.  All-reduces are taken in place, as training runs them, others out of
place; both are times of one software.  ``sendrecv`` sends around a ring of all ranks at once: within a node every
message stays there, over two nodes the slowest crosses; over more it depends on their order and is left out.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections import Counter
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from stepsight.dataset.base.bounded import check_unpacked, read_unpacked, reason
from stepsight.dataset.kinds import benchmark_names
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective
from stepsight.dataset.tables.measurements import Rows, device_name, read_csv, read_text

LOGS = r"\.(log|out|txt)(\.gz)?$"
FILES = LOGS + r"|\.(csv|tar)(\.gz)?$|\.tgz$"
_OTHERS = ("reduce", "gather", "scatter", "hypercube", "alltoallv")
_PARSED = ("collective", "n_ranks", "n_nodes", "device", "size_bytes", "time_us_oop", "time_us_ip")
MOST_ERROR = 1e-2  # of sums in 32 bits and less; a number of wrong results is 1 at least
_OTHER_OUTPUT = re.compile(r"NCCL\s+(INFO|WARN)")
_TAG = re.compile(r"\[\d+,\d+\]<std(?:out|err)>:")  # mpirun --tag-output
_RANK = re.compile(r"#\s+Rank\s+(\d+) .*? on\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s+(.+)")
_LIBRARY = re.compile(r"nccl-library=(\d+)|NCCL version (\d+\.\d+\.\d+)")
# What NCCL, or a script before it, says of its environment; names of what changes no time are left out.
_VARIABLE = re.compile(r"\b(NCCL_(?!DEBUG|SOCKET_IFNAME|TESTS)[A-Z0-9_]+)(?: set by environment to |=)([^\s,;\"']+)")
_TYPES = "int8|uint8|int32|uint32|int64|uint64|half|float|double|bfloat16|fp8_e4m3|fp8_e5m2|f8e4m3|f8e5m2"
_ROW = re.compile(rf"(?:\d+: )?\s*(\d+)\s+(\d+)\s+({_TYPES})\s+(.*)")
_LIKE_A_ROW = re.compile(r"(?:\d+: )?\s*\d+\s+\d+\s+[a-z]\w*\s+(?:\S+\s+){6,}")
UNKNOWN_TYPE = "a row of a type that is not known"
_CLUSTER = re.compile(r"(?:example-)?cluster\d+")


def read(rows: Rows) -> None:
    """Logs, archives of logs, or a table of what logs say."""
    if rows.path.name.endswith((".csv", ".csv.gz")):
        for line in read_csv(rows, _PARSED):
            with rows.row(line.number):
                log, nodes, device = line.cells.get("file", ""), line.whole("n_nodes"), device_name(line.text("device"))
                fabric = _fabric(nodes, device, log)
                told = {"device": device, "fabric": fabric, "software": "nccl-tests", "part": log}
                times = line.real("time_us_oop"), line.real("time_us_ip")
                wrong = line.cells.get("wrong_oop", "0"), line.cells.get("wrong_ip", "0")
                work = line.text("collective"), line.whole("size_bytes", 0), line.whole("n_ranks", 2), nodes
                _add(rows, told, work, times, wrong)
        return
    if not rows.path.name.endswith((".tar", ".tar.gz", ".tgz")):
        _read_log(rows, str(rows.path), read_text(rows))
        return
    try:
        data = read_unpacked(rows.path)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for number, member in enumerate(archive, 1):
                file = archive.extractfile(member) if re.search(LOGS, member.name) else None
                if file is not None:
                    check_unpacked(member.size, len(data), rows.path)  # a sparse member takes no room in the archive
                    with rows.row(number):
                        _read_log(rows, member.name, file.read().decode("utf-8"))
    except (OSError, EOFError, tarfile.TarError) as error:
        raise rows.error(f"must be a whole archive of logs ({reason(error)})") from None


def _fabric(num_nodes: int, device: str, path: str) -> str:
    """Within a node, what such devices come with; between nodes, the cluster that the log's path names."""
    if num_nodes > 1:
        cluster = _CLUSTER.search(path)
        return f"nccl-tests-{cluster[0]}" if cluster else ""
    return {"h100-sxm-80gb": "dgx-h100", "a100-sxm-80gb": "dgx-a100"}.get(device, "")


def _read_log(rows: Rows, path: str, log: str) -> None:
    """A log may hold several runs, each with its own header; a run that failed just ends."""
    log = _TAG.sub("", log)
    tests = re.compile(rf"({'|'.join((*benchmark_names(), *_OTHERS))})_perf")
    test, library, num_rows = _named(tests, path, log), "", 0
    ranks: dict[int, tuple[str, str]] = {}
    variables: dict[str, str] = {}
    told: dict[str, str] = {}
    for number, text in enumerate(log.splitlines(), 1):
        row = _ROW.match(text)
        if row is None:
            if _LIKE_A_ROW.match(text):
                rows.skip(UNKNOWN_TYPE)
            if found := tests.search(text):
                test = found[1]
            if found := _LIBRARY.search(text):
                code = int(found[1] or 0)
                library = f" nccl {found[2] or f'{code // 10000}.{code // 100 % 100}.{code % 100}'}"
            if found := _VARIABLE.search(text):
                variables[found[1]] = found[2].rstrip(".")
            if found := _RANK.search(text):
                if told:  # the next run's
                    ranks, told, variables = {}, {}, {}
                ranks[int(found[1])] = (found[2], found[3].strip())
            continue
        num_rows += 1
        if not test:
            rule = "a log must name its test in it (as all_reduce_perf) or in its name (as all_reduce)"
            raise rows.error(f"{rule}, or must hold sums of 1 GB/s and more", number)
        per_host = Counter(host for host, _ in ranks.values())
        if len(ranks) > 1 and (len(ranks) <= max(ranks) or len(set(per_host.values())) > 1):
            rows.skip("a run whose log does not list all of its ranks")  # processes may overwrite each other's lines
            continue
        if _OTHER_OUTPUT.search(row[4]):
            rows.skip("a row that other output interrupts")
            continue
        if len(ranks) < 2:
            rule = f"a log must list two ranks or more (#  Rank  0 ... on HOST ...), got {len(ranks)}"
            raise rows.error(rule, number)
        if not told:
            device = device_name(ranks[min(ranks)][1])
            software = [f"nccl-tests{library}", *(f"{name}={variables[name]}" for name in sorted(variables))]
            told = {"device": device, "fabric": _fabric(len(per_host), device, path), "software": " ".join(software)}
            told["part"] = f"{path}:{number}"
        with rows.row(number):
            size = int(row[1])
            _add(rows, told, (test, size, len(ranks), len(per_host)), *_times(size, row[4]))
    if not num_rows:
        if not (test and ranks):
            raise rows.error("a log of nccl-tests must list its ranks, then sizes with times and bandwidths")
        rows.skip("a log of failed runs alone")


def _named(tests: re.Pattern[str], path: str, log: str) -> str:
    """The test of a log that names none: by its path, or by how bus bandwidths of its sums relate to the others.

    Logs of nccl-tests name their test since version 2.17 alone.
    """
    named = tests.search(PurePath(path).name)
    if named is not None:
        return named[1]
    spelt = {"".join(name.split("_")): name for name in benchmark_names()}
    for part in PurePath(path).parts[:-3:-1]:  # the file, then its folder
        word = re.sub(r"[^a-z]", "", part.lower()).replace("bcast", "broadcast")
        if len(found := {name for short, name in spelt.items() if short in word}) == 1:
            return found.pop()
    for row in filter(None, map(_ROW.match, log.splitlines())):
        with suppress(ValueError, IndexError):
            cells = row[4].split()
            rate, bus = float(cells[-3]), float(cells[-2])
            if cells[0] == "sum" and rate >= 1:
                return "all_reduce" if bus > 1.1 * rate else "reduce_scatter" if bus < 0.98 * rate else ""
    return ""


def _times(size: int, text: str) -> tuple[tuple[float, float], tuple[str, str]]:
    """Out-of-place and in-place microseconds, and their wrong results, of what follows size, count and type.

    Before them stand the reduction and the root, in old versions one of them or neither.
    """
    cells = text.split()
    cells = cells[max(0, min(len(cells) - 8, 2)) :]
    try:
        times, rates = (float(cells[0]), float(cells[4])), (float(cells[1]), float(cells[5]))
        wrong = cells[3], cells[7]
    except (ValueError, IndexError):
        raise ValueError(f"a row must end with twice time, algbw, busbw, #wrong, got {text!r:.80}") from None
    for time_us, rate in zip(times, rates, strict=True):
        if time_us < 0 or abs((size / time_us / 1e3 if time_us else 0.0) - rate) > 0.02 + 0.05 * rate:
            raise ValueError(f"algbw must be size / time, got {rate} for {size} bytes in {time_us} us")
    return times, wrong


def _add(rows: Rows, told: dict[str, str], work: tuple[str, int, int, int], times: tuple[Any, Any], wrong: Any) -> None:
    """Add a result of a test: its name, bytes, ranks and nodes; microseconds and wrong results, in place comes last."""
    test, size, group, nodes = work
    kind = benchmark_names().get(test)
    in_place = kind == "all_reduce"
    cell = wrong[in_place].strip()  # a number of wrong results, or in logs before 2022 the largest relative error
    try:
        right = cell in ("", "N/A") or float(cell) < MOST_ERROR
    except ValueError:
        right = False
    if kind is None or size == 0 or not right:
        rows.skip(f"no collective kind for {test}" if kind is None else "wrong results" if size else "no message size")
        return
    if group % nodes:
        raise ValueError(f"nodes must have as many ranks each, got {group} on {nodes}")
    per_node = group // nodes
    if COLLECTIVE_KINDS[kind].route == "message":
        if nodes > 2:
            rows.skip("a ring of messages over more than two nodes")
            return
        group, per_node = 2, 3 - nodes
    rows.add(Collective(kind, size, group, per_node), times[in_place] * 1e-6, **told)
