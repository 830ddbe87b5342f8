# Sourced by the scripts, from the root of the repository. `ensure_venv` makes .venv/ with Rekindle
# (editable), its extras and the tools of [dependency-groups], at the versions in constraints.txt. It
# needs only a Python. If .venv/ is up to date, it compares one small file and returns.
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

ALL_EXTRAS=plan,plot,huggingface,lightning

list_tools() { # the requirements of all dependency groups: `pip install --group` needs pip 25.1
    .venv/bin/python -c 'import tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]
print(*(line for group in groups.values() for line in group), sep="\n")'
}

ensure_venv() { # [EXTRAS], without the tools; default: all extras and the tools
    # The stamp holds the path too, because moving the folder breaks an editable install.
    local extras=${1:-$ALL_EXTRAS} wanted installed='' stamp=.venv/rekindle-installed python tools=''
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
            rm -rf .venv # an incomplete .venv would look complete next time
            die "'$python -m venv .venv' failed, see above (Debian and Ubuntu: apt install python3-venv)"
        fi
    fi
    (($#)) || tools="$(list_tools)" || die "pyproject.toml cannot be read, see above"
    echo "Installing Rekindle into .venv (minutes the first time) ..." >&2
    .venv/bin/python -m pip --disable-pip-version-check -qq install \
        -c constraints.txt -e ".[$extras]" -r /dev/stdin <<<"$tools" \
        || die "pip could not install what pyproject.toml and constraints.txt ask for, see above"
    printf '%s\n' "$extras $wanted" >"$stamp"
}
