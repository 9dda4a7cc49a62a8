"""The stale engine: a bounded-staleness parameter server (after SaPS)."""
