# Sourced by the scripts, from the root of the repository: how the C++ sources are looked at.
# shellcheck shell=bash

native_files() { # all of them, headers too
    find src/rekindle/native -name '*.h' -o -name '*.cpp' | sort
}

# The same warnings as errors that users' compilers only pass over.
NATIVE_WARNINGS=(-Wall -Wextra -Wconversion -Wshadow -Wsuggest-override -Wnon-virtual-dtor)

native_include() {
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])'
}

native_flags() { # where headers of others are
    local torch
    torch="$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')"
    printf '%s\n' -std=c++20 -isystem "$(native_include)" -isystem "$torch/include" \
        -isystem "$torch/include/torch/csrc/api/include"
}

# Parsing headers takes longer than looking at the sources: so each half is one unit.
native_units() { # FOLDER: writes them there
    printf '#include "%s"\n' "$PWD"/src/rekindle/native/{engine,replay}/*.cpp >"$1/engine.cpp"
    printf '#include "%s"\n' "$PWD"/src/rekindle/native/pytorch/*.cpp >"$1/pytorch.cpp"
}

native_each() { # COMMAND: with each unit and the flags; fails if one fails
    local folder status=0 unit flags
    mapfile -t flags < <(native_flags)
    folder="$(mktemp -d)"
    cp .clang-tidy "$folder/"
    native_units "$folder"
    for unit in "$folder"/*.cpp; do
        "$1" "$unit" "${flags[@]}" || status=1
    done
    rm -r "$folder"
    return $status
}

native_warnings_in() { # UNIT FLAGS
    g++ -fsyntax-only -Werror "${NATIVE_WARNINGS[@]}" "${@:2}" "$1"
}

native_warnings() { # silent if there is no warning, or no compiler
    command -v g++ >/dev/null || return 0
    native_each native_warnings_in
}

native_tidy_in() { # UNIT FLAGS
    .venv/bin/clang-tidy -quiet "$1" -- "${@:2}"
}

native_tidy() {
    native_each native_tidy_in
}
