"""Unequal hardware on any machine: describe it, then let a process behave like it.

``scenario``  P  `Scenario`: speeds, noise, spells, changes, faults and memory caps as a pure function of the step, and
                 what it is made of: `SlowSpells`, `SpeedChange`, `Slowdown`, `Fault`
``links``     T  what lets messages, sums and layers that move take the time of described links
``throttle``  T  `Throttle`: sleeps and fails as the scenario says; `Pacer`: lets a piece of work take its time
"""

from lightning_hetero.emulate.scenario import Fault, Scenario, Slowdown, SlowSpells, SpeedChange

__all__ = ["Fault", "Scenario", "SlowSpells", "Slowdown", "SpeedChange"]
