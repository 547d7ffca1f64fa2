"""NCCL between nodes: fits, ranges, and what must hold for all sizes, ranks and networks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stepsight.dataset.hardware.hardware import Fabric, Link, find_fabric, usual_fabric
from stepsight.dataset.kinds.op import COLLECTIVE_KINDS, Collective
from stepsight.training.collectives.between_nodes import (
    FACTORS,
    KNOTS,
    UNFITTED,
    BetweenNodes,
    fit_between_nodes,
    fit_site,
    keep_better,
    left_out_seconds,
    link_doubts,
    never_falling,
    read_curve,
)
from stepsight.training.predictor.predictor import Predictor
from stepsight.training.shipped.catalogue import shipped_predictor, teaching_names

FABRIC = find_fabric("dgx-h100")
GROUPS = tuple(kind for kind in COLLECTIVE_KINDS if kind != "send_recv")
SIZES = [int(2 ** (power / 2)) for power in range(69)]  # 1 B to 16 GiB
RANKS = (*range(2, 34), *(n + d for n in (64, 88, 128, 256, 1024, 2048) for d in (-1, 0, 1)), 4095, 4096)


def _seconds(predictor: Predictor, kind: str, fabric: Fabric, near: int = 8) -> NDArray[np.float64]:
    """Seconds, ``(ranks, sizes)``."""
    works = [Collective(kind, size, n, min(n, near)) for n in RANKS for size in SIZES]
    return predictor.collective.seconds(works, fabric).reshape(len(RANKS), len(SIZES))


@pytest.fixture(params=teaching_names(), scope="module")
def shipped(request: pytest.FixtureRequest) -> Predictor:
    predictor = shipped_predictor(request.param)
    assert predictor is not None
    return predictor


@pytest.mark.parametrize("kind", GROUPS)
def test_nothing_jumps(shipped: Predictor, kind: str) -> None:
    """Time never falls with size, or with ranks beyond a node, and no rank of a started node costs more than 5 %."""
    seconds = _seconds(shipped, kind, find_fabric(usual_fabric(shipped.hardware.name)))
    assert (np.diff(seconds, axis=1) >= -1e-12 * seconds[:, 1:]).all()
    ranks = np.array(RANKS)
    beyond = ranks[:-1] >= 8
    growth = seconds[1:] / seconds[:-1]
    assert (growth[beyond] > 1 - 1e-9).all()
    same = beyond & (np.diff(ranks) == 1) & (-(-ranks[1:] // 8) == -(-ranks[:-1] // 8)) & (ranks[:-1] > 8)
    assert same.any() and (np.abs(growth[same] - 1) < 0.05).all()


@pytest.mark.parametrize("name", ["aws-p5", "gcp-a3-megagpu", "slingshot-11-2nic-h100", "sockets-100g-h100"])
def test_nothing_jumps_on_other_networks(name: str) -> None:
    """Nor does time fall with size or nodes where hosts, latencies or shared adapters hold it up."""
    predictor = shipped_predictor("h100-sxm")
    assert predictor is not None
    for kind in GROUPS:
        seconds = _seconds(predictor, kind, find_fabric(name))
        assert (np.diff(seconds, axis=1) >= -1e-12 * seconds[:, 1:]).all()
        assert (np.diff(seconds, axis=0)[np.array(RANKS[:-1]) >= 8] >= -1e-9 * seconds.min()).all()


@pytest.mark.parametrize("kind", GROUPS)
def test_a_better_network_is_never_slower_and_its_latency_counts(kind: str) -> None:
    predictor = shipped_predictor("h100-sxm")
    assert predictor is not None
    far = FABRIC.inter_node
    before = _seconds(predictor, kind, FABRIC)
    across = np.array(RANKS) > 8
    for link in (Link(far.bandwidth_bytes_per_s * 0.7, far.latency_s), Link(far.bandwidth_bytes_per_s, 15e-6)):
        assert (_seconds(predictor, kind, replace(FABRIC, inter_node=link)) >= before * (1 - 1e-9)).all()
    late = _seconds(predictor, kind, replace(FABRIC, inter_node=Link(far.bandwidth_bytes_per_s, 1e-3)))
    assert (late[across, 0] - before[across, 0] > 0.3e-3).all()


def test_a_large_sum_reaches_most_of_the_adapters_at_any_scale() -> None:
    """Two nodes exceed a ring's share, since their switches sum before anything leaves a node."""
    predictor = shipped_predictor("h100-sxm")
    assert predictor is not None
    for ranks in (16, 80, 512, 2048):
        work = Collective("all_reduce", 1 << 33, ranks, 8)
        seconds = predictor.collective.seconds([work], FABRIC)[0]
        share = 2 * work.num_bytes / seconds / (8 * FABRIC.inter_node.bandwidth_bytes_per_s)
        assert 0.7 < share < (1.3 if ranks == 16 else 1.01)


def test_factors_are_found_again() -> None:
    """A network whose bulk steps take twice as long and whose adapters reach 0.8 of what is stated."""
    truth = BetweenNodes({"all_gather": np.array([1.2, 1.4, 2.8, 1.25, 1.25])}, {}, {})
    works = [Collective("all_gather", 1 << power, 8 * nodes, 8) for power in range(10, 34, 2) for nodes in (2, 4, 8)]
    fitted = fit_between_nodes(
        works, [FABRIC] * len(works), truth.seconds(works, FABRIC), noise=0.02, independent=np.inf
    )
    assert fitted.factors_of("all_gather") == pytest.approx(truth.factors["all_gather"], rel=0.05)
    large = [Collective("all_gather", 1 << 26, 2048, 8)]
    assert fitted.seconds(large, FABRIC) == pytest.approx(truth.seconds(large, FABRIC), rel=0.05)
    assert fitted.errors["all_gather"] < 0.02


def test_a_few_rows_move_little_and_kinds_of_a_route_share() -> None:
    works = [Collective("all_gather", 1 << 28, 16, 8)]
    fitted = fit_between_nodes(works, [FABRIC], 1.5 * UNFITTED.seconds(works, FABRIC))
    assert 1.0 < fitted.seconds(works, FABRIC)[0] / UNFITTED.seconds(works, FABRIC)[0] < 1.5
    assert (fitted.factors_of("broadcast") == fitted.factors["ring"]).all()
    assert (fitted.factors_of("all_to_all") == FACTORS.prior).all()


def test_what_is_saved_is_read_and_checked() -> None:
    works = [Collective("all_reduce", 1 << power, 16, 8) for power in range(20, 30)]
    fitted = fit_between_nodes(works, [FABRIC] * len(works), 2 * UNFITTED.seconds(works, FABRIC))
    again = BetweenNodes.from_dict(fitted.to_dict())
    assert (again.seconds(works, FABRIC) == fitted.seconds(works, FABRIC)).all()
    wrong = fitted.to_dict() | {"factors": {"all_reduce": [0.01] * 5}}
    with pytest.raises(ValueError, match="factors of all_reduce must lie within"):
        BetweenNodes.from_dict(wrong)


def test_predictors_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have no such table, and answer between nodes as they did."""
    predictor = shipped_predictor("b200-sxm")
    assert predictor is not None
    earlier = replace(predictor, collective=replace(predictor.collective, between=None))
    earlier.save(tmp_path / "p")
    again = Predictor.load(tmp_path / "p")
    works = [Collective("all_reduce", 1 << 20, 8, 8), Collective("all_reduce", 1 << 20, 64, 8)]
    assert again.collective.between is None
    assert (again.collective.seconds(works, FABRIC) == earlier.collective.seconds(works, FABRIC)).all()


STATED = find_fabric("dgx-h100")
WORKS = [Collective("all_reduce", 1 << power, 16, 8) for power in (3, 6, 9, 26, 28, 30, 32)]


def _doubts(bandwidth: float = 50e9, latency: float = 10e-6) -> tuple[str, ...]:
    real: Fabric = replace(STATED, inter_node=Link(bandwidth, latency))
    return link_doubts(WORKS, STATED, UNFITTED.seconds(WORKS, real))


def test_links_as_stated_are_not_doubted() -> None:
    assert _doubts() == () == _doubts(35e9, 20e-6)
    assert link_doubts([Collective("all_reduce", 1, 8, 8)], STATED, [1.0]) == ()  # type: ignore[arg-type]


def test_sockets_are_named() -> None:
    (doubt,) = _doubts(2.5e9)
    assert "behave 20 times slower than stated (about 2.5 of 50 GB/s per device)" in doubt
    assert "sockets transport" in doubt


def test_latencies_and_bits_are_named() -> None:
    assert "short messages between nodes take" in _doubts(latency=1e-3)[0]
    slow = replace(STATED, inter_node=Link(6.25e9, 10e-6))
    assert "faster than stated (6.25 GB/s per device)" in link_doubts(WORKS, slow, UNFITTED.seconds(WORKS, STATED))[0]


def test_violators_are_pooled() -> None:
    assert never_falling(np.array([1.0, 3.0, 2.0, 4.0, 0.0])) == pytest.approx([1, 2.25, 2.25, 2.25, 2.25])
    rising = np.arange(5.0)
    assert (never_falling(rising) == rising).all()


def test_the_order_of_two_curves_stays() -> None:
    generator = np.random.default_rng(0)
    low = generator.normal(size=50)
    high = low + generator.random(50)
    assert (never_falling(low) <= never_falling(high)).all()


def test_between_knots_it_is_a_power_of_the_size_and_beyond_them_proportional() -> None:
    curve = np.log(KNOTS.astype(float) ** 0.5)
    sizes = np.array([0.0, 1.0, 300.0, float(KNOTS[-1]), 4.0 * KNOTS[-1]])
    assert read_curve(curve, sizes) == pytest.approx([1, 1, 300**0.5, 2**17, 2**19], rel=1e-3)


SUMS = [Collective("all_reduce", 1 << power, 8 * nodes, 8) for power in range(3, 34) for nodes in (2, 4)]


def test_what_was_measured_is_known_and_nothing_is_left_far_away() -> None:
    measured = UNFITTED.seconds(SUMS, FABRIC) * np.array([1.5 if c.num_bytes == 1 << 20 else 1.0 for c in SUMS])
    residual = fit_site(UNFITTED, SUMS, FABRIC, measured).residuals["all_reduce"]
    asked = [Collective("all_reduce", 1 << power, ranks, 8) for power, ranks in ((20, 16), (20, 1 << 14), (50, 16))]
    assert residual.known(asked) == pytest.approx([1, 0, 0], abs=1e-3)
    bump, *far = residual.log_factor(asked)
    assert bump > 0.1 and far == pytest.approx([0, 0], abs=1e-3)


def test_a_bump_in_the_measured_sizes_is_learned_and_time_never_falls_with_size() -> None:
    """Sums of 1 to 4 MiB take 1.6 times what the choices say: the factors cannot say so, the correction can."""
    bump = np.array([1.6 if 1 << 20 <= work.num_bytes <= 1 << 22 else 1.0 for work in SUMS])
    measured = bump * UNFITTED.seconds(SUMS, FABRIC)
    fitted = fit_site(UNFITTED, SUMS, FABRIC, measured)
    off = np.abs(np.log(fitted.seconds(SUMS, FABRIC) / measured))
    plain = np.abs(np.log(replace(fitted, residuals={}).seconds(SUMS, FABRIC) / measured))
    assert off.mean() < 0.6 * plain.mean()
    sizes = [int(2 ** (power / 4)) for power in range(137)]
    for ranks in (16, 32, 64, 512, 4096):
        seconds = fitted.seconds([Collective("all_reduce", size, ranks, 8) for size in sizes], FABRIC)
        assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()


@pytest.mark.parametrize(("factors", "carried"), [((2.0, 2.0, 2.0), 0.9), ((1.6, 1 / 1.6, 1.0), 0.2)])
def test_what_all_layouts_say_carries_over_to_others(factors: tuple[float, ...], carried: float) -> None:
    """Links twice as slow for every number of ranks are so for more ranks; layouts that disagree say nothing."""
    works = [Collective("all_reduce", 1 << power, 8 * nodes, 8) for nodes in (2, 4, 8) for power in range(20, 32, 2)]
    before = UNFITTED.seconds(works, FABRIC)
    fitted = fit_site(UNFITTED, works, FABRIC, before * np.repeat(factors, 6))
    strength = float(fitted.residuals["all_reduce"].shares[KNOTS >= 1 << 20].mean())
    assert strength > carried if carried > 0.5 else strength < carried
    larger = [Collective("all_reduce", 1 << 30, 256, 8)]
    moved = float(np.log(fitted.seconds(larger, FABRIC) / UNFITTED.seconds(larger, FABRIC))[0])
    assert moved == pytest.approx(np.log(2) if carried > 0.5 else 0.0, abs=0.15)


def test_what_more_nodes_add_to_a_sum_in_one_chunk_is_carried_to_any_number_of_them() -> None:
    """Sums of 4 to 64 KiB start as fast as the choices say, and each doubling of the nodes takes 2.5 times as long."""
    works = [Collective("all_reduce", 1 << power, 8 * nodes, 8) for nodes in (2, 4, 8) for power in range(3, 17)]
    larger = [Collective("all_reduce", 1 << power, 4096, 8) for power in range(13, 16)]

    def measured(sums: list[Collective]) -> NDArray[np.float64]:
        two = UNFITTED.seconds([replace(work, group_size=16) for work in sums], FABRIC)
        slower = np.array([2.5 if work.num_bytes >= 1 << 12 else 1.0 for work in sums])
        return two + slower * (UNFITTED.seconds(sums, FABRIC) - two)

    off = np.log(fit_site(UNFITTED, works, FABRIC, measured(works)).seconds(larger, FABRIC) / measured(larger))
    assert np.abs(off).max() < 0.5 * np.log(measured(larger) / UNFITTED.seconds(larger, FABRIC)).min()


def test_small_exchanges_that_hosts_inject_stay_longer_when_a_site_is_fitted() -> None:
    """They are as measured, and no other size falls."""
    slow = replace(FABRIC, inter_node=replace(FABRIC.inter_node, message_s=8e-6, inject_s=8e-6))
    works = [Collective("all_to_all", 1 << power, ranks, 8) for ranks in (16, 64) for power in range(6, 31)]
    measured = 1.2 * UNFITTED.seconds(works, slow)
    fitted = fit_site(UNFITTED, works, slow, measured)
    assert np.abs(np.log(fitted.seconds(works, slow) / measured)).mean() < 0.05
    sizes = [Collective("all_to_all", size, 2048, 8) for size in KNOTS.tolist()]
    falls = np.diff(np.log(fitted.seconds(sizes, slow))) < -1e-9
    assert falls.any() and (KNOTS[1:][falls] <= 4 * 192 * 2048).all() and (KNOTS[:-1][falls] >= 64 * 2048).all()


def test_it_is_saved_read_and_checked() -> None:
    fitted = fit_site(UNFITTED, SUMS, FABRIC, 1.3 * UNFITTED.seconds(SUMS, FABRIC))
    again = BetweenNodes.from_dict(fitted.to_dict())
    assert again.seconds(SUMS, FABRIC) == pytest.approx(fitted.seconds(SUMS, FABRIC), rel=1e-3)
    saved = fitted.to_dict()
    wrong = saved | {"residuals": {"all_reduce": saved["residuals"]["all_reduce"] | {"shares": [0.0, 5.0]}}}
    with pytest.raises(ValueError, match="the shares of all_reduce must be"):
        BetweenNodes.from_dict(wrong)
    wrong = saved | {"residuals": {"all_reduce": saved["residuals"]["all_reduce"] | {"depth": [[0.0, 5.0]]}}}
    with pytest.raises(ValueError, match="the depth of all_reduce must be"):
        BetweenNodes.from_dict(wrong)


def test_a_single_layout_is_judged_by_sizes_that_are_left_out() -> None:
    """A site with one layout says how its other sizes behave there."""
    works = [Collective("all_gather", 1 << power, 16, 8) for power in range(3, 32)]
    measured = UNFITTED.seconds(works, FABRIC) * np.array([1.6 if c.num_bytes > 1 << 18 else 1.0 for c in works])
    off = np.abs(np.log(left_out_seconds(partial(fit_site, UNFITTED), works, FABRIC, measured) / measured))
    assert off.mean() < 0.4 * np.abs(np.log(UNFITTED.seconds(works, FABRIC) / measured)).mean()


def test_each_kind_and_size_keeps_what_was_better() -> None:
    """Exchanges of medium messages, of which layouts disagree, stay; other sizes and kinds learn."""
    works = [
        Collective(kind, 1 << power, 8 * nodes, 8)
        for kind in ("all_reduce", "all_to_all")
        for nodes in (2, 4, 8)
        for power in range(10, 33)
    ]
    unsure = {16: 2.0, 32: 0.5, 64: 1.0}
    factors = [
        unsure[c.group_size] if c.kind == "all_to_all" and 20 <= np.log2(c.num_bytes) < 25 else 1.5 for c in works
    ]
    fitted = fit_site(UNFITTED, works, FABRIC, UNFITTED.seconds(works, FABRIC) * np.array(factors))
    medium, long = np.log2(KNOTS) == 22, np.log2(KNOTS) == 31
    shares = {kind: residual.shares for kind, residual in fitted.residuals.items()}
    assert shares["all_to_all"][medium] < 0.5 < 0.8 < min(shares["all_to_all"][long], shares["all_reduce"][medium])


def test_larger_groups_that_were_predicted_better_keep_what_was() -> None:
    """Small exchanges take twice as long in small groups alone, long ones in all groups."""
    sizes = [1 << power for power in range(10, 32, 2)]
    small, large = (
        [Collective("all_to_all", size, 8 * n, 8) for n in some for size in sizes] for some in ((2, 4), (64,))
    )
    fitted = fit_site(UNFITTED, small, FABRIC, 2 * UNFITTED.seconds(small, FABRIC))
    before = UNFITTED.seconds(large, FABRIC)
    measured = before * np.array([1.0 if c.num_bytes < 1 << 20 else 2.0 for c in large])
    changed = np.log(keep_better(UNFITTED, fitted, large, FABRIC, measured).seconds(large, FABRIC) / before)
    assert np.abs(changed[:3]).max() < 0.05 and changed[-3:].min() > 0.4


def test_calibrated_time_never_falls_with_nodes() -> None:
    """Nor where a correction of measured layouts fades beyond them."""
    works = [Collective("all_gather", 1 << power, 8 * nodes, 8) for nodes in (2, 8, 64) for power in range(4, 33, 2)]
    measured = UNFITTED.seconds(works, FABRIC) * np.repeat([1.0, 2.0, 2.0], 15)
    fitted = fit_site(UNFITTED, works, FABRIC, measured)
    for size in (64, 1 << 20, 1 << 26, 1 << 33):
        asked = [Collective("all_gather", size, 8 * nodes, 8) for nodes in (2, 3, 8, 15, 64, 65, 128, 200, 256, 1024)]
        assert (np.diff(fitted.seconds(asked, FABRIC)) >= -1e-12).all()
        alone = [fitted.seconds([work], FABRIC)[0] for work in asked]
        assert alone == pytest.approx(fitted.seconds(asked, FABRIC))  # whatever else is asked


@pytest.mark.parametrize("name", teaching_names())
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_sizes_that_were_not_measured_do_not_move_those_that_were(name: str, kind: str, ranks: int) -> None:
    """Below the smallest measured size a curve is flat; above it, it is what was learned, up to small violations."""
    found = shipped_predictor(name)
    assert found is not None and found.collective is not None
    model, fabric = found.collective, find_fabric(usual_fabric(found.hardware.name))
    assert fabric is not None
    smallest = round(float(np.exp(model.regressor.support[f"{kind}/intra"][0][0])))
    sizes = [1, 16, smallest, *(smallest * 4**power for power in range(1, 10))]
    works = [Collective(kind, size, ranks, ranks) for size in sizes]
    shown, learned = model.seconds(works, fabric), model._by_regressor(works, fabric)
    assert shown[0] == pytest.approx(shown[2]) and shown[1] == pytest.approx(shown[2])
    assert np.median(np.abs(np.log(shown[2:] / learned[2:]))) < 0.1
    assert (np.diff(shown) >= 0).all()
