"""Keeps what opens doors out of what a run says and writes: logs, configuration, environment, reports.

Covered is what can be told from others: the user and password of a URL, its parameters with such names, tokens of
known forms, and the values of this process's environment variables with such names (WANDB_API_KEY, HF_TOKEN,
AWS_SECRET_ACCESS_KEY, ...), wherever they turn up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"

_NAME = r"token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credential|signature|\bsig|\bkey"
_OF_ENVIRONMENT = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY)(?:_ID)?$", re.IGNORECASE)
_SHORTEST = (
    8  # characters of an environment variable that is worth hiding; less would hide half of every text
)

_PATTERNS = (
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s'\"]*@"), rf"\1{HIDDEN}@"),
    (re.compile(rf"([?&][^=&\s'\"]*(?:{_NAME})[^=&\s'\"]*=)[^&\s'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,})"
        ),
        HIDDEN,
    ),
)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with *** in the places of secrets."""
    for value in _values(environment):
        text = text.replace(value, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_all(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """The same for every text in plain data, such as a configuration's."""
    if isinstance(value, str):
        return redact(value, environment)
    if isinstance(value, Mapping):
        return {key: redact_all(item, environment) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact_all(item, environment) for item in value)
    return value


def _values(environment: Mapping[str, str]) -> Iterator[str]:
    """Longest first: one may be part of another. A path is where a key lies, not the key."""
    found = {value for name, value in environment.items() if _OF_ENVIRONMENT.search(name)}
    yield from sorted(
        (v for v in found if len(v) >= _SHORTEST and not v.startswith(("/", "~"))), key=len, reverse=True
    )
