# Sourced by the scripts beside it: finds or makes a Python that has what a script needs.
#
#   use_python EXTRAS MODULE...     sets PYTHON; EXTRAS of pyproject.toml bring the MODULEs
#
# .venv is used where it exists; else the active interpreter, if it has everything; else .venv is made. An
# installed torch that fits is kept, also the active interpreter's: a .venv is then made to see its packages.
# Otherwise the release in scripts/constraints.txt is installed, or what OFFLOAD_TORCH names.

readonly MIN_TORCH=2.9
readonly CORE_MODULES=(numba llvmlite numpy psutil)

has_modules() { # interpreter, modules...
    "$1" -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))' \
        "${@:2}" 2>/dev/null
}

has_torch() { # interpreter
    "$1" -c '
import sys
from importlib.metadata import version
found, wanted = ([int(part) for part in v.split(".")[:2]] for v in (version("torch"), sys.argv[1]))
sys.exit(found < wanted)' "$MIN_TORCH" 2>/dev/null
}

use_python() {
    local extras=$1
    shift
    local base=${OFFLOAD_PYTHON:-python3}
    if [[ ! -d .venv ]]; then
        if has_torch "$base" && has_modules "$base" "${CORE_MODULES[@]}" "$@"; then
            PYTHON=$base
            export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
            return
        fi
        echo "Making .venv with $("$base" --version) ..."
        local options=()
        if has_torch "$base"; then options=(--system-site-packages); fi
        "$base" -m venv "${options[@]+"${options[@]}"}" .venv
    fi
    PYTHON=$PWD/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=$PWD/.venv/Scripts/python.exe
    install_missing "$extras" "$@"
}

install_missing() { # extras, modules...
    local extras=$1
    shift
    if ! has_torch "$PYTHON"; then
        echo "Installing torch ..."
        if [[ -n ${OFFLOAD_TORCH:-} ]]; then
            "$PYTHON" -m pip install --quiet --disable-pip-version-check "$OFFLOAD_TORCH"
        else
            "$PYTHON" -m pip install --quiet --disable-pip-version-check --requirement scripts/constraints.txt
        fi
    fi
    # Once per state of pyproject.toml: the stamp names what was installed from it.
    local stamp
    stamp=.venv/installed-$extras-$(cksum <pyproject.toml | cut -d' ' -f1)
    if [[ ! -e $stamp ]] || ! has_modules "$PYTHON" "${CORE_MODULES[@]}" "$@"; then
        echo "Installing offload[$extras] ..."
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
        touch "$stamp"
    fi
}
