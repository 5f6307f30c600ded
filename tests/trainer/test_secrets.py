"""What opens doors is in nothing that a run says or writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.program import Forked, tiny
from trainer.errors import ConfigurationError
from trainer.secrets import redact, redact_all

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123",
    "HF_TOKEN": "hub-token-of-mine",
    "MY_DB_PASSWORD": "correct horse",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://me:p4ss@bucket/run", "s3://***@bucket/run"),
        ("https://token@host/x and http://a:b@c", "https://***@host/x and http://***@c"),
        (
            "https://host/x?X-Amz-Signature=abc&step=3&token=q",
            "https://host/x?X-Amz-Signature=***&step=3&token=***",
        ),
        ("401 for hf_AbCdEfGhIjKlMnOpQrSt", "401 for ***"),
        ("key 0123456789abcdef0123 refused", "key *** refused"),
        ("a correct horse", "a ***"),
        (
            "step 3, loss 2.5, a@b.c, tokens/s, s3://bucket/run",
            "step 3, loss 2.5, a@b.c, tokens/s, s3://bucket/run",
        ),
    ],
)
def test_secrets_are_replaced_and_nothing_else_is(text: str, expected: str) -> None:
    assert redact(text, SECRETS) == expected
    assert redact_all({"a": [text, 1, None]}, SECRETS) == {"a": [expected, 1, None]}


def test_short_values_and_paths_are_no_secrets() -> None:
    assert redact("true /etc/key", {"USE_TOKEN": "true", "SSL_KEY": "/etc/key"}) == "true /etc/key"


def test_an_error_for_the_user_has_none() -> None:
    assert str(ConfigurationError("cannot open s3://me:p4ss@bucket")) == "cannot open s3://***@bucket"


@pytest.mark.parametrize("fails", [False, True])
def test_no_file_of_a_run_has_one_and_all_follow_the_umask(tmp_path: Path, fails: bool) -> None:
    """In the description, on the command line, in a warning, in an error with its traceback."""

    def before(rank: int) -> None:
        import logging

        from trainer.loop import Loop

        os.environ.update(SECRETS)
        os.umask(0o027)
        train_step = Loop.train_step

        def telling(loop: Any) -> Any:
            logging.getLogger("trainer").warning("with %s", SECRETS["HF_TOKEN"])
            if fails:
                raise RuntimeError(f"no {SECRETS['MY_DB_PASSWORD']}")
            return train_step(loop)

        Loop.train_step = telling  # type: ignore[method-assign]

    folder = tmp_path / "run"
    arguments = [
        *tiny(folder),
        "--job.description",
        "from https://me:p4ss@host",
        "--metrics.enable_tensorboard",
    ]
    job = Forked.start([*arguments, "--job.print_args", "true"], 1, before)
    assert job.wait() == [4 if fails else 0], job.said
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("corpus.txt", "said")]
    for path in [*files, folder / "said"]:
        contents = path.read_bytes()
        for secret in (*SECRETS.values(), "p4ss"):
            assert secret.encode() not in contents, path
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o137 == 0 for path in files)
    assert "with ***" in (folder / "logs" / "rank_0.log").read_text()
    assert "https://***@host" in (folder / "config.toml").read_text()
    if fails:
        assert json.loads((folder / "failure.json").read_text())["reason"] == "raised RuntimeError: no ***"
