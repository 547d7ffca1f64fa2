"""Mutations that know the structure of what they change: trees of JSON, tables of CSV, lines of text, plain bytes."""

from __future__ import annotations

import copy
import csv
import io
import json
import random
import re
from collections.abc import Callable
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 8, 64, 1000, 2**31, 2**53 + 1, 2**63, 10**18, 10**30, 10**400, -(2**63), 0.0, -0.0, 0.5, 1.5,
    1e-300, 1e-9, 1e9, 1e18, 1e30, 1e300, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "0", "-1", "1e999", "inf", "nan", "1,5", "true", "None", "x" * 5000, "a\nb", "a\tb", "\x00", "\x1b[2J",
    "é", "\U0001f600", "../../etc/passwd", "/dev/zero", "%s%n", "{0.__class__}", '"', "'", ",,,", "0x10", "1_000", "٣",
)  # fmt: skip


def odd_value(rng: random.Random) -> Any:
    """A value that a careless reader trips over."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind == 6:
        return rng.choice(([], {}, [[]], [{}], {"": {}}, [1, "a", None], {"a": 1}))
    nested: Any = 1
    for _ in range(rng.choice((3, 40))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value of a tree."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def mutated_tree(rng: random.Random, tree: Any, times: int = 0) -> Any:
    """A tree with some values replaced, removed, doubled, moved or scaled."""
    tree = copy.deepcopy(tree)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        paths = places(tree)
        if not paths:
            return odd_value(rng)
        *parents, key = rng.choice(paths)
        holder = tree
        for step in parents:
            holder = holder[step]
        action = rng.randrange(8)
        if action < 3:
            holder[key] = odd_value(rng)
        elif action == 3:
            del holder[key]
        elif action == 4:
            *others, last = rng.choice(paths)
            other = tree
            try:
                for step in others:
                    other = other[step]
                holder[key] = copy.deepcopy(other[last])
            except (KeyError, IndexError, TypeError):
                pass  # it was removed by a mutation before
        elif action == 5 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice(holder)))
        elif action == 5:
            holder[rng.choice(("", "name", "source", f"{key} ", str(key).upper(), "zz"))] = odd_value(rng)
        elif isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            factor = rng.choice((-1, 0, 2, 3, 10, 1e3, 1e6, 1e-3, 1e-9, 1e12))
            whole = isinstance(holder[key], int) and (factor >= 1 or abs(holder[key]) > 1e300)
            holder[key] = holder[key] * (int(factor) if whole else factor)
        else:
            holder[key] = [holder[key]] if rng.random() < 0.5 else str(holder[key])
    return tree


def mutated_json(rng: random.Random, data: bytes) -> bytes:
    """JSON of a mutated tree; now and then with its bytes mutated instead."""
    if rng.random() < 0.12:
        return mutated_bytes(rng, data)
    return json.dumps(mutated_tree(rng, json.loads(data)), ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")


def mutated_csv(rng: random.Random, data: bytes) -> bytes:
    """A table with cells, rows or columns changed; now and then with its bytes mutated instead."""
    if rng.random() < 0.12:
        return mutated_bytes(rng, data)
    rows = list(csv.reader(io.StringIO(data.decode())))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(rows))
        row, action = rows[at], rng.randrange(8)
        if len(row) > 1 and rng.random() < 0.2:
            one, other = rng.sample(range(len(row)), 2)
            row[one], row[other] = row[other], row[one]
        elif action < 4 and row:
            column = rng.randrange(len(row))
            row[column] = str(odd_value(rng)) if rng.random() < 0.7 else rng.choice(rng.choice(rows) or [""])
        elif action == 4:
            rows.insert(at, list(row))
        elif action == 5 and len(rows) > 1:
            del rows[at]
        elif action == 6 and row:
            column = rng.randrange(len(row))
            for other in rows:
                if column < len(other):
                    del other[column]
        else:
            row.append(str(odd_value(rng)))
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8", "replace")


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def mutated_text(rng: random.Random, data: bytes) -> bytes:
    """Text with numbers, words or lines changed; now and then with its bytes mutated instead."""
    if rng.random() < 0.15:
        return mutated_bytes(rng, data)
    lines = data.decode().splitlines() or [""]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        found = list(_NUMBER.finditer(lines[at]))
        action = rng.randrange(8)
        if action < 4 and found:
            match = rng.choice(found)
            lines[at] = lines[at][: match.start()] + str(odd_value(rng)) + lines[at][match.end() :]
        elif action == 4 and len(lines) > 1:
            del lines[at]
        elif action == 5:
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
        elif action == 6 and "=" in lines[at]:
            lines[at] = f"{lines[at].partition('=')[0]}= {json.dumps(odd_value(rng))}"
        else:
            words = lines[at].split(" ")
            words[rng.randrange(len(words))] = rng.choice(TEXTS)
            lines[at] = " ".join(words)
    return "\n".join([*lines, ""]).encode("utf-8", "replace")


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        action = rng.randrange(5)
        if action == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del out[at : at + rng.choice((1, 4, 100))]
        elif action == 2:
            out[at:at] = rng.choice(
                (b"\x00", b"\xff\xfe", b"{", b"[" * 2000, b'"', b"\n", b",", b"9" * 400, b"\x1f\x8b")
            )
        elif action == 3:
            out[at:at] = out[at : at + rng.choice((1, 10, 200))]
        else:
            del out[at:]
    return bytes(out)


Mutate = Callable[[random.Random, bytes], bytes]
