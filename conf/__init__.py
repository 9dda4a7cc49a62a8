"""Configuration; a package, so that ``pkg://lightning_hetero.conf`` works once installed."""
