"""Issue order: programs in the order in which a framework's host thread launches their nodes.

Streams: ``compute``; one for each kind of group (``tp``, ``cp``, ``ep``), for copies to the host (``offload``) and for
traffic between replicas (``dp``, ``dp2``).  An op waits for what the host was told to wait for; a collective starts
when the computation has come to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepsight.dataset.graph.program import Dependency, Program, ProgramBuilder
from stepsight.dataset.kinds.op import Collective, Op
from stepsight.simulator.blocks.step import Beside, Comm, Item, Join, Lost

Work = Op | Collective


class Issue:
    """Adds work to a program in the order of issue."""

    def __init__(self, label: str = "", compute_share: float = 0.0) -> None:
        self._builder = ProgramBuilder(label)
        self._share = compute_share
        self._last: int | None = None  # newest node of the computation: an op, or a collective that blocks
        self._awaited: list[int] = []  # nodes that the next op waits for
        self._newest: dict[str, int] = {}  # by stream: what runs beside the computation until it is joined
        self._taken: dict[int, tuple[Collective, str]] = {}  # messages sent since the last computation was issued
        self.lost: list[int] = []  # nodes of the computation time lost to these messages

    def program(self) -> Program:
        return self._builder.build()

    def add(self, item: Item, name: str) -> None:
        """One item of a step."""
        if isinstance(item, Op):
            self._last = self._node(item, "compute", name, self._awaited)
            self._awaited = []
        elif isinstance(item, Lost):
            self._last = self._node(item.work, "compute", f"{name} (cores)", self._awaited, item.share)
            self._awaited = []
        elif isinstance(item, Join):
            if item.stream in self._newest:
                self._awaited.append(self._newest.pop(item.stream))
        elif isinstance(item, Comm) and not item.beside:
            self.block(item.work, item.stream, name)
        else:
            assert isinstance(item, Comm | Beside), item
            self._newest[item.stream] = self._node(item.work, item.stream, name, self._reached())

    def block(self, work: Collective, stream: str, name: str) -> int:
        """A collective that starts when the computation reaches it, and that the computation waits for."""
        self._last = self._node(work, stream, name, self._reached())
        self._newest.pop(stream, None)
        self._awaited = [self._last]
        return self._last

    def send(
        self,
        work: Collective,
        stream: str,
        name: str,
        after: Iterable[int] = (),
        *,
        early: bool = False,
        takes: bool = True,
    ) -> int:
        """A collective that overlaps with the computation; the ops after it lose ``compute_share`` of its time.

        ``early``: it was issued long before, and starts when its stream is free.  ``takes``: False for the host's work.
        """
        index = self._node(work, stream, name, sorted({*([] if early else self._reached()), *after}))
        if self._share > 0 and takes:
            self._taken[index] = (work, name)
        return index

    def wait(self, index: int) -> None:
        """Make the next op wait for a node; if no collective overlaps, no time is lost."""
        if index not in self._awaited:
            self._awaited.append(index)
        self._taken.pop(index, None)

    def take_time(self) -> None:
        """The time that the computation loses to messages in flight, before it continues."""
        for work, name in self._taken.values():
            self._last = self._node(work, "compute", f"{name} (cores)", self._awaited, self._share)
            self.lost.append(self._last)
            self._awaited = []
        self._taken.clear()

    def _reached(self) -> list[int]:
        return sorted({*self._awaited, *([] if self._last is None else [self._last])})

    def _node(self, work: Work, stream: str, name: str, after: Iterable[int], share: float = 1.0) -> int:
        why = Dependency.SYNCHRONISATION
        return self._builder.add(work, stream, name, after=after, why=why, share=share)


def issue(items: Iterable[tuple[Item, str]]) -> Program:
    """Items with their names as a program of their own."""
    one = Issue()
    for item, name in items:
        one.add(item, name)
    return one.program()
