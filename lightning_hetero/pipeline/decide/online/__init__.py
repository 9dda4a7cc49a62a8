"""The online controller's parts; `lightning_hetero.pipeline.decide.controller` puts them together (layer P)."""
