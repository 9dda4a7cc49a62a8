"""Messages between two stages of a pipeline, beside the same bytes by gloo alone."""
