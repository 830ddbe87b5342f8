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

# Parsing headers takes longer than looking at the sources: so all that know no torch are one unit.
native_unit() { # FILE: writes it
    local path
    for path in src/rekindle/native/{engine,replay}/*.cpp; do
        printf '#include "%s/%s"\n' "$PWD" "$path"
    done >"$1"
}

native_warnings() { # silent if there is no warning, or no compiler
    command -v g++ >/dev/null || return 0
    local path
    for path in src/rekindle/native/{engine,replay}/*.cpp; do
        g++ -std=c++20 -fsyntax-only -Werror "${NATIVE_WARNINGS[@]}" -isystem "$(native_include)" "$path" || return 1
    done
}

native_tidy() {
    local folder status=0
    folder="$(mktemp -d)"
    native_unit "$folder/unit.cpp"
    cp .clang-tidy "$folder/"
    .venv/bin/clang-tidy -quiet "$folder/unit.cpp" -- -std=c++20 -isystem "$(native_include)" || status=1
    rm -r "$folder"
    return $status
}
