"""The plan of a fit: the user's step tried and measured, and who computes what decided (layer L)."""
