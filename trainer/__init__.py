"""Trains decoder-only transformers from a TOML file."""

__version__ = "0.1.0"
