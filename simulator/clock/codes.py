"""Numbers of a segment's events and of a stage's clocks, which loops over arrays tell apart."""

from __future__ import annotations

RUN, SEND, BLOCK, WAIT = range(4)  # events of a segment: see ``lowering.segment.Segment.events``
# Clocks of a stage: its computation; replicas' traffic; that of a second group (hybrid shards, experts).
COMPUTE, DATA, SECOND = range(3)
NUM_CLOCKS = 3
HOST = NUM_CLOCKS  # where the host, which launches, has a clock of its own
ON_HOST = 2  # of an event that sends, in the place of whether it is early: the host's own work
