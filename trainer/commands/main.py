"""The program `stageline`: finds the command by its name and runs it.

A command is a module in this folder with `run(argv) -> exit code`; the first line of its docstring is its help.
Only the one that runs is imported.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer import __version__
from trainer.config.report import nearest
from trainer.errors import ExitCode, StagelineError

COMMANDS = (
    "plan",
    "check",
    "timeline",
    "report",
    "status",
    "sweep",
    "generate",
    "evaluate",
    "prepare",
    "submit",
    "import-hf",
    "import-meta",
    "export-hf",
)

_INTERRUPTED = 130  # as shells report a program that was ended by Ctrl-C
_USAGE = "Usage: stageline COMMAND [arguments]; stageline COMMAND --help says more"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return ExitCode.DONE if arguments else ExitCode.WRONG_CONFIGURATION
    name, *rest = arguments
    if name == "--version":
        print(f"stageline {__version__}")
        return ExitCode.DONE
    if name not in COMMANDS:
        near = nearest(name, COMMANDS, cutoff=0.5)
        hint = f"; did you mean {near}?" if near else ""
        print(
            f"stageline: there is no command {name!r}; there are {', '.join(COMMANDS)}{hint}", file=sys.stderr
        )
        return ExitCode.WRONG_CONFIGURATION
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    try:
        return int(importlib.import_module(f"trainer.commands.{_module(name)}").run(arguments))
    except StagelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python would complain once more when it closes stdout.
        sys.stdout = None
        return ExitCode.DONE


def _overview() -> str:
    lines = [_USAGE, ""]
    width = max(map(len, COMMANDS))
    lines += [f"  {name:{width}}  {_first_line(name)}" for name in COMMANDS]
    lines += ["", "Example: stageline plan --config llama_8b.toml --world-size 64"]
    return "\n".join(lines)


def _module(name: str) -> str:
    return name.replace("-", "_")


def _first_line(name: str) -> str:
    # From the text: importing every command would take seconds.
    text = Path(__file__).with_name(f"{_module(name)}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
