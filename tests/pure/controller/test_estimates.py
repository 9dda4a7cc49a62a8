"""Factors on the profile: jumps believed the second time, layers told from devices, noise ignored, the unused
forgotten, ranks blamed for their links."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from lightning_hetero.controller import estimates as module
from lightning_hetero.controller.estimates import Estimates
from lightning_hetero.controller.messages import LinkTime, Observation
from lightning_hetero.solvers.placement.pipes import Pipe
from lightning_hetero.types import Link
from tests.pure.controller.kit import cluster_of, model_of

PIPES = (Pipe((0, 1), (0, 3, 6)),)
SIZES = [(2, 2)]
WORK = [1.0, 1.0, 1.0, 1.0, 2.0, 1.0]


def estimates() -> Estimates:
    return Estimates(model_of(WORK, fixed_s=0.5), cluster_of([1.0, 0.5, 1.0]))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not measured for a hundred batches is forgotten."""
    monkeypatch.setattr(module, "_RECHECK", 100)


def seen(batch: int, slowness: Sequence[float] = (1.0, 1.0), **more: Any) -> Observation:
    """Four samples in two micro-batches: 3 + 12 s, and twice (3 + 16 s)."""
    own = (0.5 * 3 * 2 + 3 * 4, 2 * (0.5 * 3 * 2 + 4 * 4))
    return Observation(
        batch=batch,
        generation=0,
        work_s={r: s * x for r, (s, x) in enumerate(zip(own, slowness, strict=True))},
        **more,
    )


def kind(found: Estimates, name: str) -> tuple[float, ...]:
    return tuple(factor for key, factor in found.state.items() if key[0] == name)


def links_of(found: Estimates) -> dict[tuple[int, int], float]:
    return {(key[1], key[2]): factor for key, factor in found.state.items() if key[0] == "link"}


def told(found: Estimates, *observations: Observation) -> Estimates:
    for one in observations:
        found.update(one, PIPES, SIZES)
    return found


def test_what_is_as_profiled_changes_nothing() -> None:
    found = told(estimates(), *(seen(t) for t in range(20)))
    start = estimates().state
    assert found.changes(start, 0.03) == [] and found.furthest(start, 1.0) < 1e-9
    assert kind(found, "rank") == pytest.approx((1.0,) * 3)


def test_a_jump_is_believed_the_second_time_it_is_seen() -> None:
    found = told(estimates(), *(seen(t) for t in range(20)))
    start = found.state
    told(found, seen(20, (1.0, 3.0)))
    assert found.changes(start, 0.03) == []
    told(found, seen(21, (1.0, 3.0)))
    assert kind(found, "rank") == pytest.approx((1.0, 3.0, 1.0), rel=0.01)
    [(ratio, words, ranks)] = found.changes(start, 0.03)
    assert (ratio, ranks) == (pytest.approx(3.0, rel=0.01), (1,))
    assert words == "rank 1 takes 3.00 times as long as before"
    _, cluster = found.costs(found.state)
    assert cluster.devices[1].speed == pytest.approx(0.5 / 3.0, rel=0.01)
    told(found, *(seen(t) for t in (22, 23)))
    assert [words for _, words, _ in found.changes({**found.state, ("rank", 1): 3.0}, 0.03)] == [
        "rank 1 is 3.00 times as fast as before"
    ]


@pytest.mark.parametrize("noise", [0.05, 0.15])
def test_noise_is_no_change(noise: float) -> None:
    rng, found = np.random.default_rng(1), estimates()

    def drawn() -> list[float]:
        return [float(x) for x in np.exp(noise * rng.standard_normal(2))]

    told(found, *(seen(t, drawn()) for t in range(30)))
    alarms, looked = 0, found.state
    for t in range(30, 530):
        told(found, seen(t, drawn()))
        if found.changes(looked, 0.03):
            alarms, looked = alarms + 1, found.state
    assert alarms <= 0.04 * 500, alarms  # looks, not moves
    assert found.state["rank", 0] == pytest.approx(1.0, abs=noise)


def test_times_by_layer_tell_a_heavy_layer_from_a_slow_device() -> None:
    found = estimates()
    for t in range(3):
        layers: Mapping[int, Sequence[float]] = {
            0: [5.0, 25.0, 5.0],
            1: [20.0, 36.0, 20.0],
        }  # 5, 5, 5 and 10, 18, 10
        work = {rank: float(sum(parts)) for rank, parts in layers.items()}
        told(found, Observation(batch=t, generation=0, work_s=work, layer_s=layers))
    assert kind(found, "layer") == pytest.approx((1.0, 5.0, 1.0, 1.0, 1.0, 1.0), rel=0.02)
    assert kind(found, "rank") == pytest.approx((1.0, 2.0, 1.0), rel=0.02)
    model, _ = found.costs(found.state)
    assert model.layers[1].backward.per_sample_s == pytest.approx(5.0 * 2 / 3, rel=0.02)


def test_layers_too_small_to_matter_say_nothing_of_the_device() -> None:
    """Four of six take ten times as long as profiled, for what surrounds a computation; 4 % of the stage together."""
    found = Estimates(model_of([1.0, 0.01, 0.01, 1.0, 0.01, 0.01]), cluster_of([1.0]))
    pipes = (Pipe((0,), (0, 6)),)
    for t in range(20):
        layer_s = [12.0, 0.4, 0.4, 24.0, 0.4, 0.4]  # of 4 s each, and 0.04
        one = Observation(batch=t, generation=0, work_s={0: sum(layer_s)}, layer_s={0: layer_s})
        found.update(one, pipes, SIZES)
    assert kind(found, "layer")[1:3] == (1.0, 1.0)
    assert found.state["layer", 3] / found.state["layer", 0] == pytest.approx(2.0, rel=0.05)
    model, cluster = found.costs(found.state)
    spent = sum(layer.forward.seconds(4) + layer.backward.seconds(4) for layer in model.layers)
    assert spent / cluster.devices[0].speed == pytest.approx(37.6, rel=0.02), "the device has what is left"


def test_links_are_measured_by_direction_also_where_nothing_was_known() -> None:
    found = estimates()
    wire = LinkTime(source=0, target=1, messages=2, size_bytes=2e6, seconds=4 * (2e-5 + 2e-3))
    told(found, *(seen(t, links=[wire]) for t in range(3)))
    assert links_of(found) == {(0, 1): pytest.approx(4.0, rel=0.02)}
    _, cluster = found.costs(found.state)
    assert cluster.links[0][1].bandwidth_bytes_per_s == pytest.approx(1e9 / 4, rel=0.02)
    assert cluster.links[1][0] == Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    free = Estimates(model_of(WORK), cluster_of([1.0, 1.0], bandwidth=float("inf"), latency_s=0.0))
    told(free, *(seen(t, links=[wire]) for t in range(3)))
    _, cluster = free.costs(free.state)
    assert cluster.links[0][1].seconds(2e6) == pytest.approx(wire.seconds, rel=0.02)


def test_a_link_that_hardly_counts_is_no_change_however_slow() -> None:
    """Four times as long, but of a batch of 40 s that is 24 or 2400 ms more."""
    for size_bytes, counts in ((8e6, False), (8e8, True)):
        found = told(estimates(), *(seen(t, batch_s=40.0) for t in range(3)))
        before = found.state
        wire = LinkTime(source=0, target=1, messages=1, size_bytes=size_bytes / 2, seconds=2 * size_bytes / 1e9)
        told(found, *(seen(t, batch_s=40.0, links=[wire]) for t in range(3, 6)))
        words = [text for _, text, _ in found.changes(before, 0.03)]
        assert bool(words) == counts, "one of two messages was timed; both count"
        assert found.state["link", 0, 1] == pytest.approx(4.0, rel=0.05), "it is known all the same"


@pytest.mark.usefixtures("soon")
def test_what_is_used_no_more_is_forgotten_after_twice_as_long_each_time() -> None:
    found = estimates()
    told(found, *(seen(t, (1.0, 4.0)) for t in range(3)))
    alone = (Pipe((0,), (0, 6)),)

    def rest(first: int, last: int) -> list[int]:
        gone: list[int] = []
        for t in range(first, last):
            found.update(Observation(batch=t, generation=0, work_s={0: 34.0}), alone, SIZES)
            if found.forget(t):
                gone.append(t)
        return gone

    assert rest(3, 400) == [103]
    assert found.state["rank", 1] == 1.0
    told(found, *(seen(t, (1.0, 4.0)) for t in range(400, 403)))
    assert found.state["rank", 1] == pytest.approx(4.0, rel=0.05)
    assert rest(403, 800) == [603]


# ---- links that nobody measures ---------------------------------------------------------------------------------


def ringed(batch: int, ranks: Sequence[int], slow: Sequence[int] = (), pairs: Sequence[tuple[int, int]] = ()) -> Any:
    """All that a pipeline of these ranks sends; links of some ranks are 20 times slower, and so are some links."""
    around = [(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]
    links: list[LinkTime] = []
    for a, b in [*around, *((b, a) for a, b in around)]:
        factor = 20.0 if {a, b} & {*slow} or (a, b) in pairs else 1.0
        links.append(LinkTime(source=a, target=b, messages=2, size_bytes=2e6, seconds=factor * (2e-5 + 2e-3)))
    return Observation(batch=batch, generation=0, links=links)


def wired() -> Estimates:
    return Estimates(model_of(WORK), cluster_of([1.0] * 5))


def test_a_rank_whose_links_are_all_slow_is_slow_on_those_that_nobody_measured() -> None:
    found = wired()
    for t in range(3):
        found.update(ringed(t, (0, 1, 2, 3), slow=[1]), (), ())
    links = links_of(found)
    assert [links[pair] for pair in ((1, 3), (3, 1), (1, 4), (4, 1))] == pytest.approx([20.0] * 4, rel=0.05)
    assert links[1, 0] == pytest.approx(20.0, rel=0.05) and links[0, 3] == pytest.approx(1.0)
    assert not {(0, 4), (4, 0), (2, 4), (4, 2), (3, 4), (0, 2)} & {*links}  # as described
    for t in range(3, 6):
        found.update(ringed(t, (0, 1, 2, 3)), (), ())
    assert (1, 4) not in links_of(found)  # well again


def test_one_slow_link_is_no_rank_s_fault() -> None:
    found = wired()
    for t in range(3):
        found.update(ringed(t, (0, 1, 2, 3), pairs=[(0, 1), (1, 0)]), (), ())
    assert {pair for pair, factor in links_of(found).items() if factor > 1.1} == {(0, 1), (1, 0)}
    pair = wired()
    pair.update(ringed(0, (0, 1), slow=[1]), (), ())  # of two, either may be it
    assert {*links_of(pair)} == {(0, 1), (1, 0)}


def test_what_was_measured_long_ago_acquits_nobody() -> None:
    found = wired()
    for t in range(10):
        found.update(ringed(t, (0, 1, 2)), (), ())
    for t in range(10, 80):
        found.update(ringed(t, (0, 3, 1, 4), slow=[1] if t >= 70 else []), (), ())
    assert found.state["link", 1, 2] == found.state["link", 2, 1] == pytest.approx(20.0, rel=0.05)
    assert found.state["link", 0, 2] == pytest.approx(1.0)
    start = found.state
    found.update(ringed(80, (0, 3, 1, 4), slow=[1]), (), ())
    assert found.changes(start, 0.03) == [] and found.furthest(start, 1.0) < 0.01


@pytest.mark.usefixtures("soon")
def test_links_of_a_rank_are_forgotten_as_one() -> None:
    """Woken between other ranks, links nobody ever measured are slow as well: that is the second time."""
    found, gone = wired(), list[int]()
    for t in range(900):
        ranks, slow = ((0, 1, 2), [1]) if t < 3 else ((0, 4, 1, 3), [1]) if 300 <= t < 303 else ((0, 2), [])
        found.update(ringed(t, ranks, slow=slow), (), ())
        gone += [t] if found.forget(t) else []
    assert gone == [103, 503]
    assert all(factor == pytest.approx(1.0) for factor in links_of(found).values())


def at_rest(batches: Sequence[int], rest_s: float) -> list[Observation]:
    return [seen(t, rest_s={2: rest_s}) for t in batches]


def test_of_a_rank_at_rest_a_change_counts_and_no_more() -> None:
    found = estimates()
    for t in range(3):
        found._factor("rank", 2).add(4.0, t)  # as it was when it worked last
    told(found, *at_rest(range(3, 30), 0.002))
    assert found.state["rank", 2] == pytest.approx(4.0, rel=0.05)
    two = estimates()
    two.load(json.loads(json.dumps(found.to_plain())))
    told(two, *at_rest(range(30, 45), 0.002))  # a resumed run has other first times
    for one, since in ((found, 30), (two, 45)):
        told(one, *at_rest(range(since, since + 4), 0.0005))
        assert one.state["rank", 2] == pytest.approx(1.0, rel=0.05)
        told(one, *at_rest(range(since + 4, since + 8), 0.0001))
        assert one.state["rank", 2] == pytest.approx(1.0, rel=0.05)  # never better than in the beginning
        told(one, *at_rest(range(since + 8, since + 12), 0.004))
        assert one.state["rank", 2] == pytest.approx(8.0, rel=0.05)


@pytest.mark.usefixtures("soon")
def test_goes_on_from_json_as_if_nothing_had_happened() -> None:
    wire = LinkTime(source=0, target=1, messages=2, size_bytes=2e6, seconds=0.1)
    one = told(estimates(), *(seen(t, (1.0, 2.0), links=[wire]) for t in range(5)))
    two = estimates()
    one.forget(500)
    two.load(json.loads(json.dumps(one.to_plain())))
    assert two.state == one.state and two.to_plain() == one.to_plain()
    told(one, seen(5, (1.2, 2.0)))
    told(two, seen(5, (1.2, 2.0)))
    assert two.state == one.state
