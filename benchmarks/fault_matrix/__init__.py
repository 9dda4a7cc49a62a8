"""Real trainings meet real faults: engine x launcher x fault, as `tests.faults` runs and judges them.

A cell of the table is one training of three ranks (two for exceptions in hooks) on the CPU, to which one thing happens.
`tests/faults/cells.py` says what has to come of it, ``docs/reference/faults.md`` shows what has.
"""
