#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments], e.g. -m "not slow". Sets up what they need first.
# Two processes share them; -n 0 for one, as a debugger needs it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up "[test]" pytest pytest_timeout xdist hypothesis wandb transformers safetensors
cd "$here"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
exec "$python" -m pytest -n 2 --dist loadscope "$@"
