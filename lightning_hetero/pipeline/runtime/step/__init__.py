"""A training step that is suspended at its backbone and resumed (layer T)."""
