"""A model for inference: the same out of a run folder and out of the Hugging Face folder that it is exported to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from models import registry
from models.initialize import initialize_parameters
from models.llama.model import Transformer
from tests.weights.made import SIZES, hugging_face_folder
from trainer.checkpoint.manifest import Contents, Manifest, write_manifest
from trainer.checkpoint.storage import write_tensors
from trainer.commands import export_hf
from trainer.commands.generate import run
from trainer.errors import ConfigurationError, ExitCode
from trainer.generation import Continuation, generate
from trainer.inference import find_model
from trainer.sampling import Sampling

OVERRIDE = {"vocab_size": 258, "n_layers": 2, "dim": 32, "ffn_hidden": 48, "n_heads": 4}


def made_run(folder: Path, add_bos: bool) -> Path:
    """A run folder with the bytes as its tokenizer."""
    sizes = "\n".join(f"{key} = {value}" for key, value in OVERRIDE.items())
    begin = str(add_bos).lower()
    (folder / "config.toml").write_text(
        f'[model]\ntokenizer_path = "byte"\n[model.override]\n{sizes}\n[data]\nadd_bos = {begin}\n'
    )
    model = Transformer(registry.configured_sizes("llama3", "debug", "rmsnorm", OVERRIDE))
    initialize_parameters(model, 1)
    step = folder / "checkpoint" / "step-3"
    step.mkdir(parents=True)
    files = write_tensors(step, {"model": model.state_dict()}, None)
    write_manifest(step, Manifest(3, Contents.FULL, "1", 1, files))
    return folder


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_exported_model_writes_the_same_text(
    tmp_path: Path, add_bos: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, exported = made_run(tmp_path, add_bos), tmp_path / "exported"
    assert export_hf.run([str(trained), str(exported)]) == ExitCode.DONE
    capsys.readouterr()
    texts = []
    for folder in (trained, exported):
        assert (
            run(["--checkpoint", str(folder), "--prompt", "def ", "--max-new-tokens", "12"]) == ExitCode.DONE
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("def \n")
    first, second = find_model(trained).load(), find_model(exported).load()
    assert first.prompt("a") == second.prompt("a") == ([256, 97] if add_bos else [97])
    assert first.prompt("") == second.prompt("") == [256]
    assert first.stop == second.stop == {257}


def test_a_text_ends_at_every_token_that_the_folders_files_name(tmp_path: Path) -> None:
    trained, exported = made_run(tmp_path, True), tmp_path / "exported"
    assert export_hf.run([str(trained), str(exported)]) == ExitCode.DONE
    (exported / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert find_model(exported).load().stop == {257, 3, 5}
    (exported / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"generation_config\.json cannot be read"):
        find_model(exported).load()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    hugging_face_folder(tmp_path / "model", SIZES["llama"])
    with pytest.raises(ConfigurationError, match="holds no tokenizer"):
        find_model(tmp_path / "model").load()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_greedy_text_is_that_of_transformers_alone_and_in_batches(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    ours = hugging_face_folder(tmp_path, SIZES[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = [[5, 9, 200, 31], [17], [100, 101, 102, 103, 104, 105, 106]]
    expected = [_greedy(theirs, [prompt], 24)[0] for prompt in prompts]
    assert len({tuple(text) for text in expected}) == len(prompts)
    greedy = Sampling(temperature=0)
    assert [list(generate(ours, prompt, 24, greedy)) for prompt in prompts] == expected
    assert _greedy(theirs, prompts, 24) == expected  # their own padding
    texts = Continuation(ours, prompts, 24, greedy, [0] * 3)
    steps = []
    while not texts.done:
        steps.append(texts.step())
    assert [list(text) for text in zip(*steps, strict=True)] == expected


def _greedy(model: torch.nn.Module, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    written = model.generate(
        padded,
        attention_mask=seen,
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[list[int]] = written[:, longest:].tolist()
    return found
