"""The parameter server and its workers (layer T)."""
