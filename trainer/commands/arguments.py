"""What the command lines share: a parser that refuses in one line, and kinds of numbers."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trainer.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of a wrong configuration: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self.prog}: {message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)
