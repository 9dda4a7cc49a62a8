"""Random faults against the stale engine on a virtual clock, counted; the simulation is `tests.ranks.stale.simulated`."""
