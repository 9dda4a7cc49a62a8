"""The package's version: alone, so that no module has to import the whole package to know it."""

__version__ = "0.2.0"
