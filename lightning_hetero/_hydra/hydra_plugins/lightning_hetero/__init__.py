"""Hydra plugin of lightning-hetero; Hydra imports every module here whenever any Hydra app starts."""
