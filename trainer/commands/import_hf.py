"""Make a run folder of a model in Hugging Face's form.

Example: stageline import-hf ~/models/Llama-3.2-1B outputs/llama-3.2-1b

FOLDER holds config.json and safetensors (one file, or several with an index), and the tokenizer's files. OUT then has a
configuration, the tokenizer, and the weights as the checkpoint of step 0, in the number format that they had: for
`stageline generate`, `evaluate` and `export-hf`, and for training with --checkpoint.initial_load_path OUT. An import
that was interrupted goes on when it is started again. docs/weights.md says more.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def run(argv: list[str]) -> int:
    """Import as the arguments say. Returns the exit code: 2 if the folder holds no model that Stageline has."""
    arguments = _parse(argv)
    # Imports torch: only once the command line is known to be right.
    from trainer.weights.console import run_import
    from trainer.weights.hugging_face import open_model
    from trainer.weights.importing import from_hugging_face

    return run_import(
        "stageline import-hf", lambda: from_hugging_face(open_model(arguments.folder)), arguments.out
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "stageline import-hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the Hugging Face folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the run folder to be made")
    return parser.parse_args(argv)
