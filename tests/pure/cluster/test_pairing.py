"""Who meets whom when links are measured, and what is made of noisy and missing measurements."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster.pairing import complete_links, level, meetings, tournament
from lightning_hetero.types import Link

names = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40)


def link(rate: float, wait: float = 0.0) -> Link:
    return Link(bandwidth_bytes_per_s=rate, latency_s=wait)


def disjoint(pairs: list[tuple[int, int]]) -> bool:
    met = [rank for pair in pairs for rank in pair]
    return len(met) == len(set(met))


@pytest.mark.parametrize("n", range(2, 18))
def test_in_a_tournament_all_meet_once_in_the_fewest_rounds(n: int) -> None:
    rounds = tournament(range(n))
    assert len(rounds) == n - 1 + n % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(n), 2))
    assert all(disjoint(pairs) for pairs in rounds)


@given(names, st.integers(2, 5))
def test_many_ranks_meet_in_disjoint_pairs_that_join_them_all(hosts: list[str], all_up_to: int) -> None:
    rounds = meetings(hosts, all_up_to=all_up_to)
    assert all(pairs and disjoint(pairs) and all(a < b for a, b in pairs) for pairs in rounds)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    joined = {0}
    for _ in hosts:
        joined |= {rank for pair in pairs if joined & set(pair) for rank in pair}
    assert joined == set(range(len(hosts)))
    measured = {p: link(1e9, 1e-5) for a, b in pairs for p in ((a, b), (b, a))}
    for wired in ((), set(hosts)):  # enough was measured to tell what the rest is
        rows = complete_links(measured, hosts, wired=wired)
        assert {rows[a][b] for a in range(len(hosts)) for b in range(len(hosts)) if a != b} <= {link(1e9, 1e-5)}


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.floats(0.0, 0.5))
def test_levelling_moves_values_by_noise_only_and_keeps_their_order(values: list[float], tolerance: float) -> None:
    out = level(values, tolerance)
    for value, new in zip(values, out, strict=True):
        assert value / (1 + tolerance) * (1 - 1e-12) <= new <= value * (1 + tolerance) * (1 + 1e-12)
    order = sorted(range(len(values)), key=values.__getitem__)
    assert all(out[a] <= out[b] for a, b in pairwise(order))
    if tolerance == 0.0:
        assert out == values


def test_links_between_two_hosts_are_one_class_and_directions_are_not() -> None:
    noisy = {(0, 2): link(10, 3), (0, 3): link(12, 1), (1, 2): link(1, 50), (1, 3): link(11, 2)}  # one was disturbed
    back = {(b, a): link(5, 2) for a, b in noisy}
    inside = {(0, 1): link(90), (1, 0): link(100), (2, 3): link(70), (3, 2): link(80)}
    rows = complete_links(noisy | back | inside, ["x", "x", "y", "y"])
    assert {rows[a][b] for a in (0, 1) for b in (2, 3)} == {link(11, 2)}
    assert {rows[b][a] for a in (0, 1) for b in (2, 3)} == {link(5, 2)}
    assert rows[0][1] == rows[1][0] == link(100) and rows[2][3] == link(80)  # of two, what was disturbed less


def test_wires_inside_a_host_keep_their_own_values_up_to_noise() -> None:
    fast, slow = {(0, 1): link(100), (1, 0): link(110)}, {(0, 2): link(10), (2, 0): link(10.5)}
    rows = complete_links(fast | slow, ["x"] * 3, wired={"x"}, tolerance=0.25)
    assert rows[0][1] == rows[1][0] == link(105) and rows[0][2] == rows[2][0] == link(10.25)
    assert rows[1][2] == link(100)  # not measured: the better middle one of four


def test_a_class_without_measurement_is_as_slow_as_its_slower_side() -> None:
    hosts = ["x", "y", "z"]
    measured = {(0, 1): link(8, 1), (1, 0): link(6, 1), (1, 2): link(4, 5), (2, 1): link(3, 2)}
    rows = complete_links(measured, hosts)
    assert rows[0][2] == link(4, 5) and rows[2][0] == link(3, 2)
    with pytest.raises(ValueError, match="no link from host 'x' to host 'z'"):
        complete_links({(0, 1): link(1)}, hosts)
