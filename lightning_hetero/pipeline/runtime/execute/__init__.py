"""Walks a schedule: stages, messages between neighbours, failures known to all ranks (layer T)."""
