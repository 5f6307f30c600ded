"""Conversations to documents of which only what the assistant says is learned.

A template is Jinja, by a name of those below or the tokenizer's own (`chat_template` in the `tokenizer_config.json`
beside it), rendered in a sandbox that reads nothing and calls nothing of ours. Contents do not go through it: it is
rendered with a mark in place of each, and names of special tokens become tokens in what lies between the marks, which
is the template's own text. So no content can give itself another role. Learned are the contents of the assistant, each
with the special token after it, if the template has one there: the model is to learn where to end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.corpus import LONGEST_LINE
from trainer.data.errors import SourceFailed
from trainer.data.files import FoundFile, fingerprint, matching_files
from trainer.data.sources import ChatSource, Conversation, FlawedText, Message, Segment
from trainer.data.tokenizer import Tokenizer
from trainer.errors import ConfigurationError

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'"
        " + m.content + '<|eot_id|>' }}{% endfor %}"
    ),
}
ROLES = ("system", "user", "assistant", "tool")
_ASSISTANT = "assistant"
_MARK = re.compile("\ue000(\\d+)\ue001")
_CHUNK = 1 << 24


class ChatTemplate:
    """From conversations to segments, for one tokenizer."""

    def __init__(self, name: str | None, tokenizer: Tokenizer) -> None:
        """`name`: one of TEMPLATES, "tokenizer" for the tokenizer's own, or None: its own if it has one, else chatml.

        Raises ConfigurationError if there is no such template.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        own, self._names = _of_tokenizer(tokenizer)
        if name == "tokenizer" and own is None:
            raise ConfigurationError(
                f'data.chat_template = "tokenizer": there is no chat_template beside {tokenizer.file}; '
                f"there are {', '.join(TEMPLATES)}"
            )
        text = own if own is not None and name in (None, "tokenizer") else TEMPLATES[name or "chatml"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigurationError(f"the chat template of {tokenizer.file}: {error}") from error
        self._special = tokenizer.special_tokens
        names = sorted(self._special, key=len, reverse=True)
        self._special_names = re.compile("|".join(map(re.escape, names))) if names else None

    def segments(self, conversation: Conversation) -> tuple[Segment, ...] | FlawedText:
        """The document of a conversation; empty, with the reason, if the template refuses it."""
        messages = [
            {"role": message.role, "content": f"\ue000{number}\ue001"}
            for number, message in enumerate(conversation)
        ]
        from jinja2 import TemplateError

        try:
            text = self._template.render(messages=messages, add_generation_prompt=False, **self._names)
        # Whatever a template does wrong with these messages is raised as what Python has for it.
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            return FlawedText("", f"a conversation does not fit the chat template: {error}")
        found: list[Segment] = []
        at, ends = 0, False
        for mark in _MARK.finditer(text):
            found += self._own(text[at : mark.start()], ends)
            message = conversation[int(mark[1])]
            ends = message.role == _ASSISTANT
            found.append(Segment(message.content, ends))
            at = mark.end()
        found += self._own(text[at:], ends)
        return tuple(part for part in found if part.text or part.token is not None)

    def _own(self, text: str, ends: bool) -> Iterator[Segment]:
        """The template's own text; a special token at once after the assistant's words is learned with them."""
        at = 0
        for match in self._special_names.finditer(text) if self._special_names else ():
            yield Segment(text[at : match.start()], False)
            yield Segment("", ends and match.start() == 0, self._special[match[0]])
            at = match.end()
        # A name that the tokenizer does not have as a token is text: all that is there to say that it ends.
        rest = text[at:]
        end = re.match(r"<[^<>\s]+>", rest) if ends and at == 0 else None
        if end is not None:
            yield Segment(end[0], True)
            rest = rest[end.end() :]
        yield Segment(rest, False)


class ChatFiles(ChatSource):
    """The lines of JSON-lines files, found by an index of where they begin."""

    def __init__(self, name: str, files: list[FoundFile]) -> None:
        self.name = name
        self.fingerprint = fingerprint(files)
        self._files = files
        self._begins = [_line_begins(file) for file in files]
        self._first = np.cumsum([0, *(len(begins) - 1 for begins in self._begins)])
        if not self._first[-1]:
            raise ConfigurationError(f"{name}: the files hold no line")

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, index: int) -> Conversation | FlawedText:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        file, place = self._files[number].path, index - int(self._first[number])
        begin, end = (int(at) for at in self._begins[number][place : place + 2])
        where = f"{file}, line {place + 1}"
        if end - begin > LONGEST_LINE:
            return FlawedText("", f"{where}: longer than {LONGEST_LINE >> 20} MiB")
        try:
            with file.open("rb") as stream:
                stream.seek(begin)
                line = stream.read(end - begin)
        except OSError as error:
            raise SourceFailed(f"{self.name}: {file} cannot be read: {error.strerror}") from error
        if len(line) < end - begin:
            return FlawedText("", f"{where}: the file has become shorter")
        return _conversation(line, where)


def open_chat(dataset_path: str) -> ChatFiles:
    """The conversations in the file, folder or pattern. Raises ConfigurationError if there is none."""
    name = f'dataset "chat" ({dataset_path})'
    return ChatFiles(name, matching_files(dataset_path, (".jsonl", ".ndjson")))


def _conversation(line: bytes, where: str) -> Conversation | FlawedText:
    if not line.strip():
        return FlawedText("", f"{where}: empty")
    try:
        row: Any = json.loads(line)
        line.decode()
    except (ValueError, RecursionError) as error:
        return FlawedText("", f"{where}: broken: {error}")
    if (
        isinstance(row, dict)
        and isinstance(row.get("prompt"), str)
        and isinstance(row.get("completion"), str)
    ):
        return Message("user", row["prompt"]), Message(_ASSISTANT, row["completion"])
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        return FlawedText("", f'{where}: neither a list of "messages" nor a "prompt" and a "completion"')
    found = []
    for number, each in enumerate(messages, start=1):
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            return FlawedText("", f"{where}: message {number} is not a role ({', '.join(ROLES)}) and a text")
        found.append(Message(role, content))
    if not any(message.role == _ASSISTANT and message.content for message in found):
        return FlawedText("", f"{where}: the assistant says nothing, so there is nothing to learn")
    try:
        "".join(message.content for message in found).encode()
    except UnicodeEncodeError as error:
        return FlawedText("", f"{where}: half a surrogate pair: {error.reason}")
    return tuple(found)


def _line_begins(file: FoundFile) -> np.ndarray:
    """Where each line of a file begins, and where the last one ends."""
    found = [np.zeros(1, dtype=np.int64)]
    at = 0
    try:
        with file.path.open("rb", buffering=0) as stream:
            while chunk := stream.read(_CHUNK):
                found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + at + 1)
                at += len(chunk)
    except OSError as error:
        raise ConfigurationError(f"{file.path}: cannot be read: {error.strerror}") from error
    begins = np.concatenate(found)
    return begins if begins[-1] == at else np.append(begins, at)


def _of_tokenizer(tokenizer: Tokenizer) -> tuple[str | None, dict[str, str]]:
    """The template beside the tokenizer, if any, and the names of its begin and end tokens."""
    by_id = {token: name for name, token in tokenizer.special_tokens.items()}
    ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    names = {key: by_id.get(token, "") if token is not None else "" for key, token in ends.items()}
    beside = Path(tokenizer.file).with_name("tokenizer_config.json")
    try:
        template = json.loads(beside.read_text(encoding="utf-8")).get("chat_template")
    except FileNotFoundError:
        return None, names
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{beside}: cannot be read: {error}") from error
    return template if isinstance(template, str) else None, names


def _refuse(message: str) -> str:
    raise ValueError(message)
