"""Llama 2, 3, 3.1, 3.2 and 3.3."""

from models.family import Family
from models.llama import sizes

LLAMA2 = Family("llama2", sizes.LLAMA2, package=__name__)
LLAMA3 = Family("llama3", sizes.LLAMA3, package=__name__)
LLAMA3_1 = Family("llama3.1", sizes.LLAMA3_1, package=__name__)
LLAMA3_2 = Family("llama3.2", sizes.LLAMA3_2, package=__name__)
LLAMA3_3 = Family("llama3.3", sizes.LLAMA3_3, package=__name__)
