"""Random faults against the stale engine on a virtual clock, by `tests.ranks.stale.simulated`, counted."""
