"""Numbers from the code of compiled regions."""

from __future__ import annotations

import numpy as np

from stepsight.dataset.harness.regions.nest_work import TERMS
from stepsight.dataset.harness.regions.region_record import Launch, Region
from stepsight.features.nest_features import (
    EDGE_NUMBERS,
    LEVELLED,
    LEVELS,
    PARTS,
    TERM_SECONDS,
    nest_numbers,
    part_sums,
)


def _code(source: str, target: str, numel: int) -> str:
    return f"""
extern "C"  void kernel(const float* in_ptr0, float* out_ptr0)
{{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>({numel}L); x0+=static_cast<int64_t>(16L))
    {{
        auto tmp0 = at::vec::Vectorized<float>::loadu({source} + static_cast<int64_t>(x0), 16);
        auto tmp1 = tmp0.exp();
        tmp1.store({target} + static_cast<int64_t>(x0));
    }}
}}
"""


def _chain(numel: int) -> Region:
    """``x -> y -> z``, each by a function of its own."""
    code = {name: _code("in_ptr0", "out_ptr0", numel) for name in ("first", "second")}
    launches = (
        Launch("first", {"in_ptr0": "x", "out_ptr0": "y"}, ("op0",)),
        Launch("second", {"in_ptr0": "y", "out_ptr0": "z"}, ("op1",)),
    )
    sizes = dict.fromkeys(("x", "y", "z"), 4 * numel)
    return Region("inference", (), (), sizes, ("x",), ("z",), code, launches)


def test_an_edge_tells_who_wrote_and_how_long_ago() -> None:
    """The second nest reads what the first one just wrote; all else was touched in the last run."""
    numbers = nest_numbers(_chain(2**16))
    where, about = numbers.edges["feeds"]
    assert where.tolist() == [[0], [1]]
    assert about[0, EDGE_NUMBERS.index("log_since")] == 0
    assert numbers.edges["again"][0].shape[1] == 3


def test_bytes_lie_farther_away_in_larger_regions() -> None:
    """Buffers of a small region stay in the near cache, those of a large one do not."""
    small, large = (nest_numbers(_chain(numel)).levels.sum(axis=0) for numel in (2**12, 2**24))
    assert small[LEVELS.index("near_read")] > 0 == small[LEVELS.index("far_read")]
    assert large[LEVELS.index("far_read")] > 0 == large[LEVELS.index("near_read")]


def test_parts_add_up_to_the_terms() -> None:
    """Every term has a part."""
    numbers = nest_numbers(_chain(2**12))
    seconds = numbers.terms * TERM_SECONDS
    assert part_sums(seconds).shape == (2, len(PARTS))
    assert np.isclose(part_sums(seconds).sum(), seconds.sum())


def test_statements_add_up_to_their_nests() -> None:
    """What statements do is what their nests do; loads feed functions, and functions feed stores."""
    numbers = nest_numbers(_chain(2**16))
    statements = numbers.statements
    counted = [place for place, name in enumerate(TERMS) if name not in LEVELLED]
    assert np.allclose(statements.terms[:, counted].sum(axis=0), numbers.terms[:, counted].sum(axis=0))
    assert np.allclose(statements.levels.sum(axis=0), numbers.levels.sum(axis=0))
    assert statements.edges.T.tolist() == [[0, 1], [1, 2], [3, 4], [4, 5]]
    assert statements.nest.tolist() == [0, 0, 0, 1, 1, 1]
