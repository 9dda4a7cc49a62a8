"""Ranks that die, and ranks that join a running fit (layer L)."""
