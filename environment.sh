# Sourced by run_train.sh and run_tests.sh: leaves in $python an interpreter that has what Stageline needs.
# The active environment serves if it has everything; otherwise .venv is made beside this file, once.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"

die() { printf '%s\n' "$*" >&2; exit 1; }

# has_modules PYTHON MODULE...: whether the interpreter finds all of them (without importing: this takes 50 ms)
has_modules() {
  local interpreter=$1; shift
  "$interpreter" -c 'import importlib.util, sys
sys.exit(sys.version_info < (3, 11) or any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))' "$@" 2>/dev/null
}

# set_up EXTRAS MODULE...: EXTRAS as pip writes them, "" or "[test,dev]"; MODULEs are what must be there
set_up() {
  local extras=$1; shift
  local modules=(torch numpy tomli tomli_w pydantic datasets sentencepiece tokenizers tiktoken rich tensorboard "$@")
  for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3 "$here/.venv/bin/python"; do
    if [[ -n $python ]] && command -v "$python" >/dev/null && has_modules "$python" "${modules[@]}"; then return; fi
  done
  local base
  for base in python3 python3.13 python3.12 python3.11; do
    if command -v "$base" >/dev/null && has_modules "$base"; then break; else base=""; fi
  done
  [[ -n $base ]] || die "Stageline needs Python 3.11 or newer on the PATH"
  python=$here/.venv/bin/python
  printf 'Setting up %s (once; a few minutes on a fresh machine) ...\n' "$here/.venv" >&2
  [[ -x $python ]] || "$base" -m venv "$here/.venv" || die "cannot make $here/.venv"
  "$python" -m pip install --quiet --disable-pip-version-check -c "$here/constraints.txt" -e "$here$extras" >&2 \
    || die "the installation failed; its last words are above"
  has_modules "$python" "${modules[@]}" || die "the installation lacks one of: ${modules[*]}"
}
