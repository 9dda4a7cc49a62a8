"""Useful samples per second while workers are killed and come again: the stale engine against DDP and checkpoints."""
