"""Columns of nodes and edges of a program, and what their numbers mean."""

from __future__ import annotations

import enum


class Dependency(enum.Enum):
    """Why one node waits for another (the field's taxonomy)."""

    DATA = "data"  # reads what the other wrote
    STREAM_ORDER = "stream_order"  # issued later on the same stream
    LAUNCH = "launch"  # the host launched it on the device
    SYNCHRONISATION = "synchronisation"  # an event or a wait across streams of one rank
    RENDEZVOUS = "rendezvous"  # the same collective on another rank
    HOST_ORDER = "host_order"  # later on the same host thread


WHY = tuple(Dependency)  # by number
WHY_NUMBER = {why: number for number, why in enumerate(WHY)}

OP, COLLECTIVE, HOST = range(3)
NODE_KINDS = ("op", "collective", "host")
PHASES = ("forward", "backward", "optimizer")
NODE_COLUMNS = (
    "kind", "stream", "step", "phase", "work", "name", "known", "call", "group", "seq", "blocks", "threads",
    "registers", "shared_bytes", "recorded",
)  # fmt: skip
EDGE_COLUMNS = ("source", "target", "why")
OPAQUE = "opaque"
