"""Make a Hugging Face folder of a checkpoint.

Example: stageline export-hf outputs/llama_8b ~/models/mine --dtype bfloat16

CHECKPOINT is a run folder, of which the latest valid checkpoint is taken, or one of its step-N folders, of any layout,
with or without the optimizer's state. FOLDER then loads with transformers' AutoModelForCausalLM and AutoTokenizer. An
export that was interrupted goes on when it is started again. docs/weights.md says more.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from trainer.errors import ExitCode, StagelineError

_DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def run(argv: list[str]) -> int:
    """Export as the arguments say. Returns the exit code: 2 if there is no valid checkpoint."""
    arguments = _parse(argv)
    # Imports torch: only once the command line is known to be right.
    import torch

    from trainer.checkpoint.weights import find_trained_model
    from trainer.weights.console import note, progress_bar
    from trainer.weights.exporting import plan_export, write_folder

    try:
        trained = find_trained_model(arguments.checkpoint)
        for problem in trained.passed_over:
            note(f"passed over: {problem}")
        export = plan_export(trained, getattr(torch, arguments.dtype) if arguments.dtype else None)
        with progress_bar("exporting", export.size) as progress:
            write_folder(export, arguments.folder, arguments.shard_size, progress, note)
    except StagelineError as error:
        note(f"stageline export-hf: {error}")
        return error.exit_code
    print(f"{arguments.folder}: {trained.step_folder} ({export.size / 1e9:.3g} GB)")
    return ExitCode.DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "stageline export-hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="run folder or step-N folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the Hugging Face folder to be made")
    parser.add_argument("--dtype", choices=_DTYPES, help="number format (default: that of the checkpoint)")
    parser.add_argument(
        "--shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="largest file, like 500MB (default 5GB)",
    )
    return parser.parse_args(argv)


def _size(text: str) -> int:
    """Bytes of a size like 5GB."""
    match = re.fullmatch(r"([1-9][0-9]*) ?([KMG]i?B|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size like 500MB, 5GB or 2GiB, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]
