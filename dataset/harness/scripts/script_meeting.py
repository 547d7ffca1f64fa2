"""How the ranks of a user's script find each other: through the harness' file, independent of the script's address."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import cores
from ..running.workers import FILE


def meet_through_file() -> None:
    """Have ``init_process_group`` of a script meet through the harness' file, and its threads leave the rank's core.

    PyTorch's own ``env://`` and ``tcp://`` listen on every address of the machine.
    """
    from torch.distributed.rendezvous import _rendezvous_handlers

    meeting = _Meeting()
    _rendezvous_handlers["env"] = _rendezvous_handlers["tcp"] = meeting.handler
    c10d._new_process_group_helper = _on_any_core(c10d._new_process_group_helper)


class _Meeting:
    """A store of its own for each time that a script starts its process groups."""

    def __init__(self) -> None:
        self._times = 0

    def handler(self, url: str, timeout: timedelta = timedelta(minutes=10), **_: Any) -> Iterator[tuple[Any, int, int]]:
        """Yield the store, the rank and the world size."""
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(query.get("rank", os.environ.get("RANK", 0)))
        size = int(query.get("world_size", os.environ.get("WORLD_SIZE", 1)))
        self._times += 1
        store: Any = dist.FileStore(os.environ[FILE], size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        yield dist.PrefixStore(f"script{self._times}", store), rank, size  # type: ignore[attr-defined]
        raise RuntimeError("ranks of a script meet once for each process group")


def _on_any_core(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Any:
        with cores.any_core():
            return original(*args, **kwargs)

    return made
