"""docs/adding-a-model.md does what it says: its family is made out of the page, and trained."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from models import registry
from models.initialize import initialize_parameters
from tests.distributed.training_run import Tables, assert_same_run, train

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


@cache
def place() -> str:
    """Where the page's family is."""
    folder = Path(mkdtemp())
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return f"{folder}/parallel:FAMILY"


def tables(more: Tables | None = None) -> Tables:
    model = {"name": place(), "flavor": "small", "override": {"vocab_size": 258}}
    return {"model": model, **(more or {})}


@cache
def one_process() -> list[dict[str, Any]]:
    return train(Path(mkdtemp()), 1, tables({"training": {"steps": 4}, "optimizer": {"lr": 1e-2}}))


def test_the_page_has_a_family_of_about_thirty_lines_in_two_files() -> None:
    assert list(FILES) == ["parallel/__init__.py", "parallel/model.py"]
    lines = [line for text in FILES.values() for line in text.splitlines() if line]
    assert len(lines) <= 33


def test_its_loss_falls() -> None:
    losses = one_process()[0]["losses"]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    "layout",
    [
        {"experimental": {"pipeline_parallel_degree": 2}},
        pytest.param({"training": {"tensor_parallel_degree": 2}}, marks=pytest.mark.slow),
    ],
    ids=["pipeline 2", "tensor 2"],
)
def test_two_ranks_train_it_as_one_process_does(tmp_path: Path, layout: Tables) -> None:
    training = {"steps": 4, **layout.get("training", {})}
    more = {**layout, "training": training, "optimizer": {"lr": 1e-2}}
    assert_same_run(one_process(), train(tmp_path, 2, tables(more)))


def test_its_parameters_are_those_of_its_sizes_and_generation_with_the_cache_is_that_without() -> None:
    family = registry.family(place())
    sizes = family.sizes["small"]
    model = family.build(sizes)
    initialize_parameters(model, 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes.parameter_count()
    tokens = torch.arange(12)[None]
    cache = model.new_cache(1, 12)
    with torch.no_grad():
        pieces = torch.cat([model(part, cache=cache) for part in tokens.split((5, 1, 6), dim=1)], dim=1)
        torch.testing.assert_close(pieces, model(tokens), rtol=1e-4, atol=1e-5)


def test_a_plan_of_it_is_made_without_torch() -> None:
    code = (
        "import sys; from trainer.config.load import load; from trainer.plan.plan import make_plan;"
        f"config = load(['--model.name', '{place()}', '--model.flavor', 'small']).config;"
        "print(make_plan(config, 1).parameters); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == registry.family(place()).sizes["small"].parameter_count()


def test_the_line_for_the_registry_is_as_those_that_are_there() -> None:
    (line,) = re.findall(r'^"parallel": .*$', PAGE, re.MULTILINE)
    written = (ROOT / "models" / "registry.py").read_text()
    assert (
        line.replace("parallel", "llama", 2).replace("FAMILY", "LLAMA2").replace('"llama"', '"llama2"')
        in written
    )
