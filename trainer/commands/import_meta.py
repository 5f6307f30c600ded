"""Make a run folder of a Llama in Meta's own form.

Example: stageline import-meta ~/models/Llama-3.1-8B/original outputs/llama-3.1-8b

FOLDER holds params.json, consolidated.00.pth and so on (several have a part of every matrix each), and tokenizer.model.
OUT then has a configuration, the tokenizer, and the weights as the checkpoint of step 0, in the number format that they
had: for `stageline generate`, `evaluate` and `export-hf`, and for training with --checkpoint.initial_load_path OUT. An
import that was interrupted goes on when it is started again. docs/weights.md says more.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def run(argv: list[str]) -> int:
    """Import as the arguments say. Returns the exit code: 2 if the folder holds no model that Stageline has."""
    arguments = _parse(argv)
    # Imports torch: only once the command line is known to be right.
    from trainer.weights.console import run_import
    from trainer.weights.importing import from_meta
    from trainer.weights.meta import open_meta

    return run_import("stageline import-meta", lambda: from_meta(open_meta(arguments.folder)), arguments.out)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "stageline import-meta", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Meta's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the run folder to be made")
    return parser.parse_args(argv)
