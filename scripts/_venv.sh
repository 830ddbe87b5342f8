# Sourced by the scripts, from the root of the repository: `ensure_venv` gives .venv/ with Rekindle
# (editable), its extras (the tools are some), at the versions in constraints.txt. Nothing but a Python
# is needed. When all is there already it compares one small file and returns.
# shellcheck shell=bash

die() {
    printf '%s: %s\n' "$0" "$1" >&2
    exit 1
}

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    die "no Python 3.11 or newer found (tried python3, python3.13, python3.12, python3.11); install one and run this again"
}

ALL_EXTRAS=plan,plot,huggingface,lightning,docs,dev

ensure_venv() { # [EXTRAS], by default all of them
    # What was installed, and where: an editable install does not survive a move of the folder.
    local extras=${1:-$ALL_EXTRAS} wanted installed='' stamp=.venv/rekindle-installed python
    wanted="$(pwd -P && cat pyproject.toml constraints.txt)"
    if [[ -f $stamp ]]; then
        installed="$(<"$stamp")"
    fi
    if [[ $installed == "$extras $wanted" || $installed == "$ALL_EXTRAS $wanted" ]]; then
        return
    fi

    if [[ ! -x .venv/bin/python ]]; then
        python="$(find_python)"
        if ! "$python" -m venv .venv; then
            rm -rf .venv # half of one would be taken for a whole one the next time
            die "'$python -m venv .venv' failed, see above (Debian and Ubuntu: apt install python3-venv)"
        fi
    fi
    echo "Installing Rekindle into .venv (minutes the first time) ..." >&2
    .venv/bin/python -m pip --disable-pip-version-check -qq install \
        -c constraints.txt -e ".[$extras]" \
        || die "pip could not install what pyproject.toml and constraints.txt ask for, see above"
    printf '%s\n' "$extras $wanted" >"$stamp"
}
