"""Imports point one way, and the half that plans does without torch: read from the sources, all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("trainer", "parallelisms", "models")
HEAVY = {
    "torch",
    "numpy",
    "datasets",
    "sentencepiece",
    "tokenizers",
    "tiktoken",
    "tensorboard",
    "wandb",
    "rich",
}

# Whatever a laptop does in a second, from the configuration to the plan and its pictures.
PLANNING = (
    *("trainer.launch", "trainer.stop", "trainer.errors", "trainer.run_folder"),
    *("trainer.config", "trainer.plan", "trainer.commands"),
    *(
        "models.registry",
        "models.sizes",
        "models.llama.sizes",
        "parallelisms.layout",
        "parallelisms.context.split",
    ),
    "parallelisms.tensor_plan",
    *("models.hf", "models.llama.hf", "models.qwen3.hf", "models.qwen3_moe.hf", "models.deepseek_v3.hf"),
    *("trainer.weights.naming", "trainer.weights.folder", "trainer.weights.safetensors_format"),
    *(
        f"parallelisms.pipeline.{name}"
        for name in (
            *("actions", "bounds", "communicate", "csv", "errors", "factory", "release", "schedules"),
            *("setting", "sharding", "simulate", "split", "verify"),
            *("advice", "assemble", "comparison", "costs", "figures", "measured", "timeline_file"),
            *("picture", "picture_build", "picture_layout", "picture_svg", "picture_text", "trace"),
        )
    ),
)


@dataclass(frozen=True)
class Import:
    """One imported module; `lazy` inside a function."""

    module: str
    lazy: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of the program by its name."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    return {"train": ROOT / "train.py", **{n.removesuffix(".__init__"): path for n, path in named.items()}}


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(modules()[module].read_text()), lazy=False))


def _imports(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                yield from (Import(alias.name, lazy) for alias in child.names)
            case ast.ImportFrom(module=str(source)):
                for alias in child.names:
                    whole = f"{source}.{alias.name}"
                    yield Import(whole if whole in modules() else source, lazy)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, lazy=True)
            case _:
                yield from _imports(child, lazy)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@cache
def loaded_by(module: str) -> frozenset[str]:
    """What importing the module imports, directly or not; of libraries, the first part of the name."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in modules():
            found.add(name.split(".")[0])
        elif name not in found:
            found.add(name)
            parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
            waiting += [*parents, *(each.module for each in imports(name) if not each.lazy)]
    return frozenset(found)


@pytest.mark.parametrize("package", ["parallelisms", "models"])
def test_what_is_below_the_trainer_never_imports_it(package: str) -> None:
    upward = [
        f"{name} imports {each.module}"
        for name in modules()
        if within(name, package)
        for each in imports(name)
        if within(each.module, "trainer") or each.module == "train"
    ]
    assert not upward


def test_models_do_not_know_how_they_are_laid_out() -> None:
    assert not [
        f"{name} imports {each.module}"
        for name in modules()
        if within(name, "models")
        for each in imports(name)
        if within(each.module, "parallelisms")
    ]


def test_the_planning_half_imports_no_torch_and_nothing_else_that_is_slow() -> None:
    planning = [name for name in modules() if any(within(name, part) for part in PLANNING)]
    assert len(planning) > 60
    slow = {name: sorted(loaded_by(name) & HEAVY) for name in planning}
    assert {name: found for name, found in slow.items() if found} == {}
    assert all(part in modules() for part in PLANNING), "a part of the list is not there any more"


def test_commands_are_imported_by_nobody_but_their_own_parts() -> None:
    assert not [
        f"{name} imports {each.module}"
        for name in modules()
        for each in imports(name)
        if within(each.module, "trainer.commands") and not within(name, "trainer.commands")
    ]
    commands = {name for name in modules() if name.startswith("trainer.commands.")}
    runs = {name for name in commands if "\ndef run(" in modules()[name].read_text()}
    assert runs
    assert not [(name, e.module) for name in commands for e in imports(name) if e.module in runs]
