"""Make a run folder of a model in Hugging Face's form.

Example: stageline import-hf ~/models/Llama-3.2-1B outputs/llama-3.2-1b

FOLDER holds config.json and safetensors (one file, or several with an index), and the tokenizer's files. OUT then has a
configuration, the tokenizer, and the weights as the checkpoint of step 0, in the number format that they had: for
`stageline generate`, `evaluate` and `export-hf`, and for training with --checkpoint.initial_load_path OUT. An import
that was interrupted goes on when it is started again. docs/weights.md says more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.errors import ExitCode, StagelineError


def run(argv: list[str]) -> int:
    """Import as the arguments say. Returns the exit code: 2 if the folder holds no model that Stageline has."""
    arguments = _parse(argv)
    # Imports torch: only once the command line is known to be right.
    from trainer.weights.bar import progress_bar
    from trainer.weights.hugging_face import open_model
    from trainer.weights.importing import from_hugging_face, write_run_folder

    try:
        imported = from_hugging_face(open_model(arguments.folder))
        with progress_bar("importing", imported.size) as progress:
            write_run_folder(imported, arguments.out, progress, _note)
    except StagelineError as error:
        _note(f"stageline import-hf: {error}")
        return error.exit_code
    named = imported.named
    parameters = named.sizes.parameter_count() / 1e9
    print(f"{arguments.out}: {named.name} {named.flavor}, {parameters:.3g} billion parameters")
    if named.override:
        print(
            f"with model.override: {', '.join(f'{key} = {value}' for key, value in named.override.items())}"
        )
    if not imported.tokenizer_files:
        print(
            f"{arguments.folder} holds no tokenizer; set model.tokenizer_path in {arguments.out}/config.toml"
        )
    return ExitCode.DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "stageline import-hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the Hugging Face folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the run folder to be made")
    return parser.parse_args(argv)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
