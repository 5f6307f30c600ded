"""DeepSeek-V3, and models of its architecture."""

from models.deepseek_v3 import sizes
from models.family import Family

DEEPSEEK_V3 = Family("deepseek_v3", sizes.DEEPSEEK_V3, package=__name__)
