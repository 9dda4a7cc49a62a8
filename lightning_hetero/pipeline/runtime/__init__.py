"""Carries a plan out on this rank (layer T)."""
