# Sourced by the scripts, from the root of the repository. `ensure_venv LEVEL` makes .venv/ with
# Rekindle (editable), at the versions in constraints.txt, and compiles the native core meanwhile.
# LEVEL is `demo` (what the demo needs), `test` (also all extras and what the fast tests need) or `all`
# (all tools as well). It needs only a Python. If .venv/ is up to date, it compares one small file and
# returns.
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

LEVELS=(demo test all) # each has what the levels before it have

list_requirements() { # LEVEL: those that Rekindle itself does not require
    .venv/bin/python - "$1" <<'END'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
wanted = {
    "demo": [extras["plan"], extras["plot"]],
    "test": [*extras.values(), groups["test"]],
    "all": [*extras.values(), *groups.values()],
}
print(*(line for lines in wanted[sys.argv[1]] for line in lines), sep="\n")
END
}

pip_install() { # ARGUMENTS: torch's many modules are compiled when they are imported, to save time
    .venv/bin/python -m pip --disable-pip-version-check -qq install --no-compile -c constraints.txt "$@"
}

ensure_venv() { # LEVEL
    # The stamp holds the path too, because moving the folder breaks an editable install.
    local level=$1 stamp=.venv/rekindle-installed wanted installed='' enough=false each python
    wanted="$(pwd -P && cat pyproject.toml constraints.txt)"
    if [[ -f $stamp ]]; then
        installed="$(<"$stamp")"
    fi
    for each in "${LEVELS[@]}"; do
        if [[ $each == "$level" ]]; then
            enough=true
        fi
        if $enough && [[ $installed == "$each $wanted" ]]; then
            return
        fi
    done

    if [[ ! -x .venv/bin/python ]]; then
        python="$(find_python)"
        if ! "$python" -m venv .venv; then
            rm -rf .venv # an incomplete .venv would look complete next time
            die "'$python -m venv .venv' failed, see above (Debian and Ubuntu: apt install python3-venv)"
        fi
    fi
    echo "Installing Rekindle into .venv (minutes the first time) ..." >&2
    pip_install -e . || die "pip could not install what pyproject.toml and constraints.txt ask for, see above"
    list_requirements "$level" >.venv/requirements
    # Compile the core while pip installs the rest. xargs is used because Ctrl-C ends its children.
    # Without a compiler, the first budget says what to install.
    export -f pip_install
    printf '%s\0' '.venv/bin/rekindle build >&2 || true' 'pip_install -r .venv/requirements' \
        | xargs -0 -n 1 -P 2 bash -c 'eval "$1"' bash \
        || die "pip could not install what pyproject.toml and constraints.txt ask for, see above"
    printf '%s\n' "$level $wanted" >"$stamp"
}
