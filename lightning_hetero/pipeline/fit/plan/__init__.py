"""The plan of a fit: the user's step tried and measured, and which rank computes what decided (layer L)."""
