#!/bin/sh
# The public headers compile alone, without a warning, as C11 and as C++11, with whatever of gcc and clang is here; and
# so does every internal header as C11, first in its file.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -fsyntax-only -I$root/include"
compiled=0

# The second include sees that the guard holds; the use, that the initialisers work in both languages.
cat >"$work/use.c" <<'CODE'
#include <acromion.h>
#include <acromion_nccl.h>
#include <acromion.h>
#include <acromion_nccl.h>
int use(void);
int use(void)
{
    acr_problem problem = ACR_PROBLEM_INIT;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    acr_merge_args merge = ACR_MERGE_ARGS_INIT;
    acr_append_args append = ACR_APPEND_ARGS_INIT;
    acr_group_options group = ACR_GROUP_OPTIONS_INIT;
    const uint32_t bytes =
        problem.size + buffers.size + options.size + report.size + merge.size + append.size + group.size;
    return bytes == 0 ? ACR_OK : 1;
}
CODE
cp "$work/use.c" "$work/use.cpp"
for compiler in gcc clang; do
    command -v $compiler >/dev/null || { echo "no $compiler here"; continue; }
    # shellcheck disable=SC2086  # lists of options
    $compiler -std=c11 -Wstrict-prototypes $strict "$work/use.c"
    # shellcheck disable=SC2086
    echo '#include <acromion_nccl.h>' | $compiler -std=c++11 -x c++ -Wold-style-cast $strict - || exit 1
    # shellcheck disable=SC2086
    $compiler -std=c++11 -x c++ -Wold-style-cast $strict "$work/use.cpp"
    compiled=$((compiled + 3))
    for header in "$root"/src/core/*.h "$root"/src/cpu/*.h "$root"/src/dist/*.h; do
        printf '#include "%s"\ntypedef int not_empty;\n' "$header" >"$work/alone.c"
        # shellcheck disable=SC2086
        $compiler -std=c11 -D_GNU_SOURCE -Wstrict-prototypes $strict -I"$root/src" -I"$root/src/core" \
            "$work/alone.c" || {
            echo "$header does not stand alone"
            exit 1
        }
        compiled=$((compiled + 1))
    done
done
echo "$compiled compilations"
[ $compiled -gt 0 ]
