"""Where the stale engine's time goes beyond the bound, part by part."""
