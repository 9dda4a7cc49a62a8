"""Goodput while machines go and come back; random faults against the stale engine on a virtual clock."""
