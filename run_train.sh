#!/usr/bin/env bash
# Train: ./run_train.sh [--config FILE] [--table.key VALUE ...]
#
#   ./run_train.sh                                     the debug model on the text that ships with Python
#   ./run_train.sh --config llama_8b.toml              a name is looked up in train_configs/
#   NGPU=4 ./run_train.sh --experimental.pipeline_parallel_degree 4
#
# NGPU: processes on this node. Without it: the number of GPUs, or what the configured degrees need.
# LOG_RANK: whose log is shown, e.g. 0,1.
# Sets up .venv first, unless the active environment has what is needed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up ""
exec "$python" -m trainer.launch "$@"
