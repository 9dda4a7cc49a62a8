"""What a late contribution changes in the mean of the update that it missed (layer P).

The plain way takes a late gradient for one of the present parameters: it joins the mean of the update that is next.
With momentum b, learning rate lr, curvature h and a late fraction p of every update that is

    x(t+1) = x(t) + b (x(t) - x(t-1)) - lr h ((1 - p) x(t) + p x(t-1)),

which is stable up to lr h = (1 - b) / p: at b = 0.9 and p = 0.1 that is 1, where training in time is stable up to
2 (1 + b) = 3.8. Late gradients act as more momentum (Mitliagkas et al. 2016), and a learning rate at the edge has no
room for that.

Completing leaves them out of the feedback. An update is the mean of what is up to date; what comes late corrects the
mean of the update that it *missed*, by the running mean of textbooks, and the next update moves by that correction:

    m(v)  <-  m(v) + c,   c = w / W (g - m(v))        W: what counts in m(v), w of this contribution included
    update t:  m(t) + the c of what arrived since the last one

In the end every update is the mean of all that was computed with its parameters, each sample in it counts the same, and
what is late is only its difference from the others, which has no mean: noise, not feedback. Ours.
"""

from __future__ import annotations


def completed(weight: float, late: float) -> tuple[float, float]:
    """Returns what a mean counts after a late contribution, and the part of the difference that it moves by.

    Args:
        weight: what the mean counts so far, >= 0, e.g. its samples.
        late: what the contribution counts, >= 0.

    >>> completed(48.0, 16.0)
    (64.0, 0.25)
    """
    whole = weight + late
    return whole, late / whole if whole else 0.0
