# Sourced by the scripts, from the root of the repository: functions that check the C++ sources.
# shellcheck shell=bash

native_files() { # prints all of them, headers too
    find src/rekindle/native -name '*.h' -o -name '*.cpp' | sort
}

# Warnings that fail the check; users' compilers ignore them.
NATIVE_WARNINGS=(-Wall -Wextra -Wconversion -Wshadow -Wsuggest-override -Wnon-virtual-dtor)

native_include() {
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])'
}

native_flags() { # prints the folders of third-party headers
    local torch
    torch="$(.venv/bin/python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')"
    printf '%s\n' -std=c++20 -isystem "$(native_include)" -isystem "$torch/include" \
        -isystem "$torch/include/torch/csrc/api/include"
}

# Each half is one unit, because parsing the headers takes most of the time.
NATIVE_UNITS=(torch engine)

native_unit() { # UNIT FOLDER: writes the unit there, and prints its path
    case "$1" in
        torch) printf '#include "%s"\n' "$PWD"/src/rekindle/native/{allocator,torch,ops,memory/{records,observers,registry,room,recomputer,sources,slices,held},memory,steps,dispatch,python}/*.cpp ;;
        engine) printf '#include "%s"\n' "$PWD"/src/rekindle/native/{base,engine,replay}/*.cpp ;;
    esac >"$2/$1.cpp"
    printf '%s\n' "$2/$1.cpp"
}

native_each() { # COMMAND [UNIT...]: runs it on each unit (default: all) with the flags; fails if one fails
    local command="$1" folder status=0 unit flags
    shift
    (($#)) || set -- "${NATIVE_UNITS[@]}"
    mapfile -t flags < <(native_flags)
    folder="$(mktemp -d)"
    cp .clang-tidy "$folder/"
    for unit in "$@"; do
        "$command" "$(native_unit "$unit" "$folder")" "${flags[@]}" || status=1
    done
    rm -r "$folder"
    return $status
}

native_warnings_in() { # FILE FLAGS
    g++ -fsyntax-only -Werror "${NATIVE_WARNINGS[@]}" "${@:2}" "$1"
}

native_warnings() { # [UNIT...]: silent if there is no warning, or no compiler
    command -v g++ >/dev/null || return 0
    native_each native_warnings_in "$@"
}

native_tidy_in() { # FILE FLAGS
    .venv/bin/clang-tidy -quiet "$1" -- "${@:2}"
}

native_tidy() { # [UNIT...]
    native_each native_tidy_in "$@"
}

native_format() {
    native_files | xargs .venv/bin/clang-format --dry-run -Werror
}
