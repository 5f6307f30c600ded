"""Bytes that one module keeps for its backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """Of one module, bytes for each token of a microbatch.

    Attributes:
        input: its input, which is all that stays under activation checkpointing.
        inside: what else it saves.
        deferred: what stays from the gradient of the input to that of the weights, when these are separate:
            input and output gradient of every linear layer.
        temporary: the most that its own backward needs beside all that, for a moment.
        forward_temporary: the same of its forward.
        per_sequence: bytes for each position of a microbatch, whatever its number of sequences; modules of one
            stage share them.
        holds_input: whether the input itself is among what is kept, and not only a copy in another format.
    """

    input: int = 0
    inside: int = 0
    deferred: int = 0
    temporary: int = 0
    forward_temporary: int = 0
    per_sequence: int = 0
    holds_input: bool = True

    @property
    def whole(self) -> int:
        return self.input + self.inside
