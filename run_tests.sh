#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments], e.g. -m "not slow". Sets up what they need first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up "[test]" pytest pytest_timeout hypothesis wandb transformers safetensors
cd "$here"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
exec "$python" -m pytest "$@"
