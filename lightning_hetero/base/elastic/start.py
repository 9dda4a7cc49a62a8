"""Members and newcomers wait for one another before the epoch that they begin together (layer L).

    newcomer                        members
    says "ready", waits             wait, and say so again and again; the lowest hears the newcomers' signs of life
    <------------------------------ decides: with all; or, once everybody is ready or lost, with those that are ready
    all: begin, or make another group without those that are lost

A collective would be simpler; but where a rank is silent, nobody can leave one before the timeout of the process group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from lightning_hetero.base.elastic.coming import Beats, Coming
from lightning_hetero.base.elastic.groups import MeetingPlace
from lightning_hetero.base.elastic.join import JoinRequests

_LOAD_S = 10.0  # for the silence of a newcomer while it loads what it resumes from
_MEMBER_S = 20.0  # for that of a member
_LOOK_S = 0.02
_ASK_S = 0.5


def wait_as_member(
    rank: int,
    asking: Sequence[int],
    before: Sequence[int],
    *,
    coming: Coming,
    place: MeetingPlace,
    requests: JoinRequests,
) -> None:
    """Returns when all newcomers are ready to train.

    Args:
        rank: this one.
        asking: the newcomers.
        before: the members, ascending.
        coming: where all find out what is decided.
        place: tells who is connected.
        requests: of the lowest member, which has the newcomers' signs of life.

    Raises:
        RuntimeError: somebody has died, or is silent; who begins nevertheless is decided.
    """
    beats, asked_s, watches = Beats(coming.waited), -math.inf, rank == before[0]
    others = [member for member in before if member != rank]
    while coming.decided() is None:
        if watches and all(map(coming.waited, before)):
            coming.decide(asking)  # if all are ready
        now_s = time.monotonic()
        if now_s - asked_s > _ASK_S:
            asked_s = now_s
            coming.waits(rank)
            ready = {*coming.come(asking)}
            lost = {*others, *ready} - {*place.alive()} | {*beats.silent(others, now_s, for_s=_MEMBER_S)}
            if watches:
                lost |= {*requests.silent(asking, for_s=_LOAD_S)}
            still = {*asking} - ready | {member for member in others if not coming.waited(member)}
            # Those that still load are waited for, whoever else is lost; unless nobody knows whether they live. If all
            # have come meanwhile, the next look says so.
            if lost and (bool(still) and still <= lost if watches else before[0] in lost):
                coming.decide(asking, _why(lost))
        time.sleep(_LOOK_S)
    _check(coming)


def wait_as_newcomer(rank: int, members: Sequence[int], *, coming: Coming, place: MeetingPlace) -> None:
    """As `wait_as_member`, for a rank that comes in and is connected.

    Args:
        rank: this one.
        members: all ranks of the new process group; which of them are newcomers, too, need not be known.
        coming, place: see there.
    """
    beats, asked_s = Beats(coming.waited), -math.inf
    coming.ready(rank)
    while coming.decided() is None:
        now_s = time.monotonic()
        if now_s - asked_s > _ASK_S:
            asked_s = now_s
            others = {*members} - {*coming.come(members)}  # the members, and newcomers that still load
            if not others & {*place.alive()} - {*beats.silent(others, now_s, for_s=_MEMBER_S)}:
                coming.decide(members, _why(others))
        time.sleep(_LOOK_S)
    _check(coming)


def _why(lost: set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(lost)))} died or fell silent"


def _check(coming: Coming) -> None:
    decided = coming.decided()
    if decided is not None and decided[1]:
        raise RuntimeError(f"not all newcomers have come: {decided[1]}")
