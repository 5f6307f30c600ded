"""Weights in float8 with a factor for each block of a matrix, as DeepSeek-V3 was released, read as bfloat16.

Beside each such matrix `name` lies `name_scale_inv` (fp32): by its element (i, j) block (i, j) of the matrix is multiplied
(DeepSeek-AI 2024, arXiv 2412.19437, section 3.3; the blocks are 128 · 128).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigurationError

QUANTIZED = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Blocks:
    """Rows and columns of a block."""

    rows: int
    columns: int

    def count(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many blocks a matrix of this shape has in each dimension: the shape of its factors."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def around(
        self, offsets: Sequence[int], lengths: Sequence[int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """First block and number of blocks in each dimension that a part of a matrix touches."""
        sizes = self.rows, self.columns
        first = tuple(offset // size for offset, size in zip(offsets, sizes, strict=True))
        after = tuple(
            -(-(offset + length) // size)
            for offset, length, size in zip(offsets, lengths, sizes, strict=True)
        )
        return (first[0], first[1]), (after[0] - first[0], after[1] - first[1])

    def multiply(self, part: Tensor, factors: Tensor, offsets: Sequence[int]) -> Tensor:
        """A part of a matrix that begins at `offsets`, times the factors of the blocks that it touches, in bf16."""
        row, column = offsets[0] % self.rows, offsets[1] % self.columns
        each = factors.repeat_interleave(self.rows, 0)[row : row + part.shape[0]]
        each = each.repeat_interleave(self.columns, 1)[:, column : column + part.shape[1]]
        return (part.float() * each).to(torch.bfloat16)


def blocks_of(config: Mapping[str, Any], path: Path) -> Blocks | None:
    """The blocks that a `config.json` speaks of; None: the weights are not quantised.

    Raises ConfigurationError for another quantisation.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    try:
        method, (rows, columns) = quantization["quant_method"], quantization["weight_block_size"]
        if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3" and rows >= 1 and columns >= 1:
            return Blocks(int(rows), int(columns))
    except (KeyError, TypeError, ValueError, AttributeError):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    raise ConfigurationError(
        f"{path}/config.json: quantization_config has the method {method!r}; of quantised weights Stageline reads "
        "fp8 with weight_block_size only: save the model unquantised first"
    )
