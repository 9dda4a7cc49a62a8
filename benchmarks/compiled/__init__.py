"""Really compiled modules whose batches change size: recompilations, and what they cost."""
