from pathlib import Path

import pytest

from stepsight.dataset.job.job import Job
from stepsight.simulator.blocks.family import embedding_block, find_family, head_block, layer_block
from stepsight.simulator.programs.sizes import rank_shape
from tests.simulator.blocks.shapes import collectives, items

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_blocks_of_every_example_build(path: Path) -> None:
    job = Job.from_file(path)
    shape = rank_shape(job)
    for kind, _ in find_family(job.model.family).layer_kinds(job.model):
        assert items(layer_block(shape, kind), backward=True)
    assert embedding_block(shape) and head_block(shape)


def test_experts_of_the_mixtral_example_stay_within_a_node() -> None:
    job = Job.from_file(EXAMPLES / "mixtral-8x22b-ep-256.toml")
    dispatch = collectives(layer_block(rank_shape(job), "moe"), "ep")
    assert {(c.group_size, c.ranks_per_node) for c in dispatch} == {(8, 8)}
