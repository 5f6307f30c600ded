"""Qwen3, the dense models."""

from models.family import Family
from models.qwen3 import sizes

QWEN3 = Family("qwen3", sizes.QWEN3, package=__name__)
