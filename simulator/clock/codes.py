"""Codes of a segment's events and of a stage's clocks, for the loops over arrays."""

from __future__ import annotations

RUN, SEND, BLOCK, WAIT = range(4)  # events of a segment: see ``lowering.segment.Segment.events``
# Clocks of a stage: its computation; replicas' traffic; the traffic of a second group (hybrid shards, experts).
COMPUTE, DATA, SECOND = range(3)
NUM_CLOCKS = 3
HOST = NUM_CLOCKS  # the clock of the host, which launches, if it has its own
ON_HOST = 2  # replaces the flag "early" of an event that sends: work of the host itself
