"""One pipeline in a given order: its time, its memory, the exact split into stages (layer P)."""
