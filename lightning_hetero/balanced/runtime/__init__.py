"""Unequal parts made exact gradients (layer T)."""
