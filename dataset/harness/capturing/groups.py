"""Process groups of the fake world: no other rank exists, and every collective finishes at once.

Values mean nothing: a collective has its effect on real tensors (meshes, counts, object collectives), and none on fake
ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..one_rank_group import LISTS, Call, OneRankGroup
from .collectives import Collectives, people_name

BACKEND = "captured"


class Done(dist.Work):
    """A collective that was issued; ``wait`` makes the current stream wait for it."""

    def __init__(self, collectives: Collectives, mark: Any, result: list[Tensor]) -> None:
        super().__init__()
        self._collectives, self._mark, self._result = collectives, mark, result

    def wait(self, timeout: Any = None) -> bool:
        self._collectives.wait(self._mark)
        return True

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return Awaited(self)


class Awaited(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a collective: reading its value makes the current stream wait."""

    def __new__(cls, done: Done) -> Any:
        return super().__new__(cls)

    def __init__(self, done: Done) -> None:
        super().__init__()
        self._done = done
        self.set_result(done.result())

    def wait(self) -> Any:
        self._done.wait()
        return super().wait()


class Group(OneRankGroup):
    """A process group of the fake world.

    Args:
        rank: In the group.
        ranks: Of the world, in the order of the group.
        name: torch's.
        collectives: Where they are written down.
    """

    def __init__(self, rank: int, ranks: list[int], name: str, collectives: Collectives) -> None:
        super().__init__(rank, ranks, name)
        self._collectives = collectives
        self._batch: list[Done] | None = None
        self._description = ""

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def name(self) -> str:
        return BACKEND

    @property
    def where(self) -> tuple[str, str, tuple[int, ...]]:
        """torch's name of the group, its name for people, and its ranks."""
        return self._name, people_name(self._description, self._ranks), self._ranks

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Done:
        raise RuntimeError("a receive from any rank cannot be captured: name the rank that sends")

    def barrier(self, opts: Any = None, *rest: Any) -> Done:
        self._collectives.wait_on_host("barrier")
        return Done(self._collectives, None, [])

    def monitored_barrier(self, *given: Any, **named: Any) -> None:
        self.barrier()

    def _get_backend(self, device: Any) -> Any:
        return self

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> Done:
        batch, self._batch = self._batch or [], None
        return batch[-1] if batch else Done(self._collectives, None, [])

    @property
    def supports_coalescing(self) -> bool:
        return False

    def shutdown(self) -> None:
        return None

    abort = shutdown

    def _issue(self, call: Call) -> Done:
        if call.effect is not None and not any(isinstance(each, FakeTensor) for each in (*call.reads, *call.writes)):
            with unset_fake_temporarily(), torch.no_grad():
                call.effect()
        kind = "all_gather" if call.kind == LISTS else call.kind
        tensors = call.reads, call.writes
        mark = self._collectives.issue(
            kind, call.full, tensors, self._place_of(call), is_async=not call.waits, direction=call.direction
        )
        done = Done(self._collectives, mark, list(call.writes))
        if self._batch is not None:
            self._batch.append(done)
        return done

    def _place_of(self, call: Call) -> tuple[str, str, tuple[int, ...]]:
        """As ``where``; a message joins two ranks."""
        name, people, ranks = self.where
        if not call.direction:
            return name, people, ranks
        own, other = ranks[self.rank()], ranks[call.peer]
        line = (own, other) if call.direction == "send" else (other, own)
        return f"{name} {line}", people, line
