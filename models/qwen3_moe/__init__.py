"""Qwen3, the mixture-of-experts models."""

from models.family import Family
from models.qwen3_moe import sizes

QWEN3_MOE = Family("qwen3_moe", sizes.QWEN3_MOE, package=__name__)
