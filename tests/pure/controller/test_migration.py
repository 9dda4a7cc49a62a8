"""What travels from plan to plan: all that is missing, nothing else, from someone who has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_hetero.controller.migration import MigrationModel, piece_bytes, pieces_between
from lightning_hetero.solvers.placement.neighbours import Pipes
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from tests.pure.controller.kit import cluster_of, model_of, structures

MODEL = model_of([1.0] * 6)
PROBLEM = Problem(MODEL, cluster_of([1.0] * 5), 8, (1,))


def held(pipes: Pipes) -> set[tuple[int, int]]:
    """(rank, layer)"""
    return {
        (rank, layer)
        for pipe in pipes
        for stage, rank in enumerate(pipe.ranks)
        for layer in range(pipe.cuts[stage], pipe.cuts[stage + 1])
    }


@settings(max_examples=100)
@given(old=structures(), new=structures())
def test_exactly_what_is_missing_travels_from_an_owner(old: Pipes, new: Pipes) -> None:
    before, after = held(old), held(new)
    moves = [(s, t, layer) for a, b, s, t in pieces_between(PROBLEM, old, new) for layer in range(a, b)]
    assert sorted((target, layer) for _, target, layer in moves) == sorted(after - before)
    assert all((source, layer) in before for source, _, layer in moves)
    assert (MigrationModel().pause_s(PROBLEM, old, new) > 0.0) == bool(moves)


def test_a_new_leader_needs_what_is_outside_the_backbone() -> None:
    model = replace(MODEL, head=replace(MODEL.head, state_bytes=7.0))
    problem = Problem(model, cluster_of([1.0] * 3), 8, (1,))
    old, new = (Pipe((0, 1), (0, 3, 6)),), (Pipe((1, 0), (0, 3, 6)),)
    assert pieces_between(problem, old, new) == [(-1, 0, 0, 1), (0, 3, 0, 1), (3, 6, 1, 0)]
    assert piece_bytes(problem, (-1, 0, 0, 1)) == 7.0


def test_the_pause_is_the_busiest_ranks_and_is_corrected_by_what_was_measured() -> None:
    old = (Pipe((0,), (0, 6)),)
    model = MigrationModel()
    one = model.pause_s(PROBLEM, old, (Pipe((0, 1), (0, 3, 6)),))
    two = model.pause_s(PROBLEM, old, (Pipe((0,), (0, 6)), Pipe((1,), (0, 6)), Pipe((2,), (0, 6))))
    assert one == pytest.approx(0.05 + 3e6 / 1e9, rel=1e-2)
    assert two == pytest.approx(0.05 + 12e6 / 1e9, rel=1e-2)  # rank 0 sends to both
    model.learn(one, 3.0 * one)
    assert model.pause_s(PROBLEM, old, (Pipe((0, 1), (0, 3, 6)),)) == pytest.approx(3.0 * one)
    model.learn(3.0 * one, 3.0 * one)  # as predicted by now
    assert model.scale == pytest.approx(3.0)
    again = MigrationModel()
    again.ratios = model.ratios
    assert again.scale == model.scale
