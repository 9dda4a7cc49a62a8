"""One fit of the stale engine inside Lightning: a rank's way through the server's versions (layer L)."""
