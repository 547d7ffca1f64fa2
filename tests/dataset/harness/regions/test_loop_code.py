"""Counts of what a compiled function does."""

from __future__ import annotations

from stepsight.dataset.harness.regions.inductor import Access, Launch, Loop, Region
from stepsight.dataset.harness.regions.loop_code import BodyOp, Nest, is_strided, launch_dims, nests_of, region_dims
from stepsight.dataset.harness.regions.statements import Touch

ROWS, WIDTH = 100, 40
_SOFT = """
extern "C"  void kernel(const float* in_ptr0, const float* in_ptr1, float* out_ptr0)
{
    {
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(100L); x0+=static_cast<int64_t>(1L))
        {
            for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(40L); x1+=static_cast<int64_t>(16L))
            {
                {
                    if(C10_LIKELY(x1 >= static_cast<int64_t>(0) && x1 < static_cast<int64_t>(32L)))
                    {
                        auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x1 + 40L*x0), 16);
                        auto tmp1 = in_ptr1[static_cast<int64_t>(x0)];
                        auto tmp2 = std::sqrt(tmp1);
                        auto tmp3 = at::vec::Vectorized<float>(tmp2);
                        auto tmp4 = tmp0.exp();
                        auto tmp5 = tmp4 * tmp3;
                        tmp5.store(out_ptr0 + static_cast<int64_t>(x1 + 40L*x0));
                    }
                    if(C10_UNLIKELY(x1 >= static_cast<int64_t>(32L) && x1 < static_cast<int64_t>(40L)))
                    {
                        auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x1 + 40L*x0), 8L);
                        auto tmp4 = tmp0.exp();
                    }
                }
            }
        }
    }
}
"""
_COLUMNS = """
extern "C"  void kernel(const float* in_ptr0, const int64_t* in_ptr1, float* out_ptr0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(40L); x0+=static_cast<int64_t>(1L))
    {
        for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(100L); x1+=static_cast<int64_t>(1L))
        {
            auto tmp0 = in_ptr0[static_cast<int64_t>(x0 + 40L*x1)];
            auto tmp1 = in_ptr1[static_cast<int64_t>(x1)];
            auto tmp2 = in_ptr0[static_cast<int64_t>(x0 + 40L*tmp1)];
        }
    }
}
"""


def _only(source: str) -> Nest:
    (nest,) = nests_of(source)
    return nest


def test_statements_count_as_often_as_they_run() -> None:
    """Two vectors of a row are whole and one is a part; what a row shares is taken out of the inner loop."""
    done = _only(_SOFT).ops
    assert sum(op.work for op in done if op.name == "exp") == 3 * ROWS
    (root,) = (op for op in done if op.name == "sqrt")
    assert root.work == ROWS * 2 / 3 and not root.registers  # the share of the branch, once a row


def test_accesses_have_strides_and_distinct_bytes() -> None:
    """A row is read in order; the row's own number once a row."""
    first, row = _only(_SOFT).touches[:2]
    assert (first.form, first.stride, first.times) == ("vector", 64, 2 * ROWS)
    assert (row.form, row.stride) == ("scalar", 4)
    assert row.distinct == 4 * ROWS


def test_columns_are_strided_and_looked_up_values_indirect() -> None:
    """A loop down a column takes a line for every number; an index that is read makes an access indirect."""
    nest = _only(_COLUMNS)
    column, _, looked = nest.touches
    assert column.stride == 4 * WIDTH
    assert looked.form == "indirect"
    assert [is_strided(touch) for touch in nest.touches] == [True, False, False]
    assert sum(op.work for op in nest.ops if op.name == "gather") == ROWS * WIDTH


def test_bytes_count_by_how_long_ago_they_were_touched() -> None:
    """The same call reads from a near cache or from far away."""
    touch = Touch("in_ptr0", False, "vector", 64.0, 64, 64, 4096.0)
    nest, launch = Nest((BodyOp("load", 1, "float", 64.0, touch=0),), (touch,)), Launch("f", {"in_ptr0": "x"}, ("op0",))
    near, middle, far = (
        launch_dims([nest], launch, {"x": 4096}, lambda _, bytes_since=since: bytes_since) for since in (0.0, 4e6, 1e9)
    )
    assert (near[0], middle[1], far[2]) == (4096, 4096, 4096)
    assert near[3:] == far[3:]


_EVERY_SECOND = """
extern "C"  void kernel(const float* in_ptr0, float* out_ptr0, float* out_ptr1)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(100L); x0+=static_cast<int64_t>(1L))
    {
        auto tmp0 = (x0 % 2L);
        auto tmp1 = c10::convert<int64_t>(tmp0);
        auto tmp2 = static_cast<int64_t>(0);
        auto tmp3 = tmp1 == tmp2;
        auto tmp4 = [&]
        {
            auto tmp5 = in_ptr0[static_cast<int64_t>(x0)];
            auto tmp6 = std::exp(tmp5);
            return tmp6;
        }
        ;
        auto tmp7 = tmp3 ? tmp4() : static_cast<decltype(tmp4())>(0.0);
        auto tmp8 = [&]
        {
            auto tmp9 = in_ptr0[static_cast<int64_t>(x0)];
            auto tmp10 = std::exp(tmp9);
            return tmp10;
        }
        ;
        auto tmp11 = tmp3 ? tmp8() : static_cast<decltype(tmp8())>(0.0);
        auto tmp12 = decltype(tmp7)(-tmp7);
        out_ptr0[static_cast<int64_t>(x0)] = tmp12;
        out_ptr1[static_cast<int64_t>(x0)] = tmp11;
    }
}
"""
_SUM = """
extern "C"  void kernel(const at::BFloat16* in_ptr0, float* out_ptr0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(8L); x0+=static_cast<int64_t>(1L))
    {
        float tmp_acc0 = 0;
        at::vec::VectorizedN<float,2> tmp_acc0_vec = at::vec::VectorizedN<float,2>(0);
        for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(64L); x1+=static_cast<int64_t>(32L))
        {
            auto tmp0 = at::vec::Vectorized<at::BFloat16>::loadu(in_ptr0 + static_cast<int64_t>(x1 + 64L*x0), 32);
            auto tmp1 = at::vec::convert<float,2,at::BFloat16,1>(tmp0);
            tmp_acc0_vec = tmp_acc0_vec + tmp1;
        }
        tmp_acc0 = tmp_acc0 + at::vec::vec_reduce_all<float, 2>([](auto& x, auto& y) { return x + y; }, tmp_acc0_vec);
        out_ptr0[static_cast<int64_t>(x0)] = static_cast<float>(tmp_acc0);
    }
}
"""


def test_a_function_of_the_body_runs_as_often_as_its_condition_holds_and_once() -> None:
    """Every second element is computed; the same work under the same condition is not done again."""
    done = _only(_EVERY_SECOND).ops
    assert sum(op.work for op in done if op.name == "exp") == 50
    assert not [op for op in done if op.registers]


def test_statements_take_the_results_of_others() -> None:
    """A sum takes what was loaded and widened, and its own result; what is stored is the reduced sum."""
    ops = _only(_SUM).ops
    assert [op.name for op in ops] == ["load", "widen", "carried", "reduce", "store"]
    assert [op.inputs for op in ops] == [(), (0,), (1,), (2,), (3,)]
    assert [op.registers for op in ops] == [1, 2, 2, 0, 0]
    assert [op.times for op in ops] == [16, 16, 16, 8, 8]


def test_a_buffer_that_the_call_before_wrote_is_near() -> None:
    """Of two calls of one function, the first reads what was not seen before, the second what the first one wrote."""
    reads, writes = ((Access("x", 256),), (Access("y", 256),))
    loops = (
        Loop("op0", 0, "", 64, 4, reads, writes),
        Loop("op1", 1, "", 64, 4, writes, (Access("z", 256),)),
    )
    code = """
void kernel(const float* in_ptr0, float* out_ptr0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>(16L))
    {
        auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x0), 16);
        tmp0.store(out_ptr0 + static_cast<int64_t>(x0));
    }
}
"""
    launches = (
        Launch("kernel", {"in_ptr0": "x", "out_ptr0": "y"}, ("op0",)),
        Launch("kernel", {"in_ptr0": "y", "out_ptr0": "z"}, ("op1",)),
    )
    sizes = {name: 256 for name in ("x", "y", "z")}
    region = Region("forward", (), loops, sizes, ("x",), ("z",), {"kernel": code}, launches)
    first, second = region_dims(region)
    assert (first[0], first[2]) == (0, 512)  # near and far bytes
    assert (second[0], second[2]) == (256, 256)
