"""The program of a data worker: `python -m trainer.data.encoding_worker PIPE TOKENIZER`, started by a rank."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from trainer.data.encoding import serve
from trainer.data.tokenizer import load_tokenizer

if __name__ == "__main__":
    # A Ctrl-C goes to all processes of the terminal; when a worker ends is for its rank to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])), load_tokenizer(sys.argv[2]))
