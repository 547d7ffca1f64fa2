"""Every legal strategy by number: as a job, as the parameters of an Optuna trial, and as a table of choices."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepsight.dataset.base.errors import JobError
from stepsight.dataset.job.job import Job
from stepsight.experiments.search.space import Space
from stepsight.experiments.search.strategies import Degrees, build, choices_of, legal_degrees, options_of

if TYPE_CHECKING:
    import optuna

    from stepsight.experiments.search.expert_loads import ExpertLoads

Options = dict[str, list[Any]]


class Grid:
    """Every legal strategy, and the remaining ones.

    A layout (the degrees) and all combinations of the further choices that are legal under it make a block; strategies
    are numbered block by block.  Nothing is stored for a strategy but whether it is left.

    Shapes: ``n`` strategies.

    Attributes:
        job: The job that they are strategies of.
        space: The choices that it is made of.
        left: ``(n,)``, False where a strategy is claimed or evaluated.
        layouts, options: Of each block.
        bounds: Strategies of block ``i`` are ``bounds[i]`` to ``bounds[i + 1]``.

    Args:
        job, space: As the attributes.
        loads: Of the model's experts, which every strategy then places by their loads.

    Raises:
        JobError: If there is none.
    """

    def __init__(self, job: Job, space: Space, loads: ExpertLoads | None = None) -> None:
        self.job, self.space, self._loads = job, space, loads
        self.layouts: list[Degrees] = []
        self.options: list[Options] = []
        for layout in legal_degrees(job, space):
            options = options_of(job, space, layout)
            if all(options.values()):
                self.layouts.append(layout)
                self.options.append(options)
        self._shapes = [tuple(map(len, options.values())) for options in self.options]
        self.bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in self._shapes)])
        if not self.layouts:
            raise JobError(
                f"no legal strategy for {job.cluster.num_devices} devices and global_batch {job.batch.global_batch}"
            )
        self._block_of = {str(layout): block for block, layout in enumerate(self.layouts)}
        self.left = np.ones(len(self), dtype=np.bool_)
        self._distributions: dict[int, dict[str, Any]] = {}
        self._labels = [[_label(key, values) for key, values in options.items()] for options in self.options]
        self._seed = 0

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def _point(self, index: int) -> tuple[int, list[Any]]:
        """Block of a strategy, and its further choices."""
        block = int(np.searchsorted(self.bounds, index, side="right")) - 1
        places = np.unravel_index(index - int(self.bounds[block]), self._shapes[block])
        return block, [values[int(at)] for values, at in zip(self.options[block].values(), places, strict=True)]

    def _index(self, name: str, chosen: dict[str, Any]) -> int | None:
        """The strategy with a layout and further choices; None if it is not in this grid."""
        block = self._block_of.get(name)
        if block is None:
            return None
        options = self.options[block]
        if any(chosen.get(key) not in values for key, values in options.items()):
            return None
        places = tuple(values.index(chosen[key]) for key, values in options.items())
        return int(self.bounds[block]) + int(np.ravel_multi_index(places, self._shapes[block]))

    def strategy(self, index: int) -> Job:
        """The job in a strategy."""
        block, values = self._point(index)
        return self.build(self.layouts[block], dict(zip(self.options[block], values, strict=True)))

    def build(self, layout: Degrees, chosen: dict[str, Any]) -> Job:
        """The job with a layout and further choices."""
        job = build(self.job, layout, chosen)
        return job if self._loads is None else self._loads.apply(job)

    def find(self, job: Job) -> int | None:
        """The strategy that a job has; None if it is not in this grid."""
        layout, chosen = choices_of(job)
        index = self._index(str(layout), chosen)
        return index if index is not None and self.strategy(index) == job else None

    @cached_property
    def table(self) -> NDArray[np.int32]:
        """Block and number of each further choice in ``options`` of the block; shape ``(n, 1 + choices)``."""
        rows = [
            np.stack([np.full(shape, block), *np.indices(shape)], axis=-1).reshape(-1, 1 + len(shape))
            for block, shape in enumerate(self._shapes)
        ]
        return np.concatenate(rows).astype(np.int32)

    @cached_property
    def _codes(self) -> NDArray[np.int32]:
        """A code for each degree and choice, equal for equal values; shape ``(n, choices)``."""
        columns = [np.array(self.layouts, dtype=np.int32)[self.table[:, 0]]]
        for at, key in enumerate(self.options[0]):
            numbers: dict[Any, int] = {}
            own = [[numbers.setdefault(value, len(numbers)) for value in o[key]] for o in self.options]
            starts = np.cumsum([0, *map(len, own)])[:-1]
            flat = np.concatenate([np.array(values, dtype=np.int32) for values in own])
            columns.append(flat[starts[self.table[:, 0]] + self.table[:, 1 + at]][:, None])
        return np.concatenate(columns, axis=1)

    def params(self, index: int) -> dict[str, Any]:
        """Parameters of a trial.

        A parameter's choices may not change within a study: where they depend on the layout, so does its name.
        """
        block, values = self._point(index)
        return {"layout": str(self.layouts[block]), **dict(zip(self._labels[block], values, strict=True))}

    def distributions(self, index: int) -> dict[str, Any]:
        """Optuna's distributions of ``params``."""
        from optuna.distributions import CategoricalDistribution

        block = int(np.searchsorted(self.bounds, index, side="right")) - 1
        if block not in self._distributions:
            values = (
                {"layout": list(self._block_of)},
                dict(zip(self._labels[block], self.options[block].values(), strict=True)),
            )
            self._distributions[block] = {
                name: CategoricalDistribution(of) for named in values for name, of in named.items()
            }
        return self._distributions[block]

    def suggest(self, trial: optuna.Trial) -> int:
        """The strategy that a trial's sampler chooses."""
        name = trial.suggest_categorical("layout", list(self._block_of))
        options = self.options[self._block_of[name]]
        chosen = {key: trial.suggest_categorical(_label(key, values), values) for key, values in options.items()}
        index = self._index(name, chosen)
        assert index is not None, chosen
        return index

    def index(self, params: dict[str, Any]) -> int | None:
        """The strategy with these parameters of a trial; None if it is not in this grid."""
        name = params.get("layout", "")
        block = self._block_of.get(name)
        if block is None:
            return None
        named = zip(self.options[block], self._labels[block], strict=True)
        chosen = {key: params.get(label) for key, label in named}
        return self._index(name, chosen)

    def shuffle(self, seed: int) -> None:
        """Decide between strategies that are equally near."""
        self._seed = seed

    @cached_property
    def _turn(self) -> NDArray[np.int64]:
        return np.random.default_rng(self._seed).permutation(len(self))

    def nearest(self, index: int) -> int:
        """The remaining strategy that differs from this one in the fewest choices."""
        left = np.flatnonzero(self.left)
        distance = (self._codes[left] != self._codes[index]).sum(axis=1)
        return int(left[np.lexsort((self._turn[left], distance))[0]])


def _label(key: str, values: list[Any]) -> str:
    return f"{key}[{'|'.join(map(str, values))}]"
