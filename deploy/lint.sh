#!/bin/bash
# lint.sh - format, static analysis, Python and shell scripts. Says every finding, then fails.
set -uo pipefail
# Not analysed: kernels/cpu/kernel.c (asks for a processor feature that Debian 12's clang does not know), and the C files
# of kernels/cuda where CUDA's headers are not there.
failed=0
cuda=$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")/../include
export C_INCLUDE_PATH="$cuda" # clang's
left_out='^kernels/cpu/kernel\.c$'
[ -e "$cuda/cuda_runtime_api.h" ] || {
    echo "no CUDA headers in $cuda: kernels/cuda is not analysed"
    left_out+='|^kernels/cuda/'
}
mapfile -t all < <(git ls-files --cached --others --exclude-standard '*.c' '*.h' | xargs -r ls 2>/dev/null)
mapfile -t sources < <(printf '%s\n' "${all[@]}" |
    grep -E '^(proto|kernels|server|client)/.*\.c$' | grep -vE "$left_out")

clang-format --dry-run -Werror "${all[@]}" || failed=1

cppcheck --quiet --std=c11 --language=c --enable=warning,portability --inline-suppr -I. -Iclient/include \
    -D_GNU_SOURCE -DKLD_RELEASE='"0"' -DKLD_BUILD='"0"' -D__x86_64__ --error-exitcode=1 -j "$(nproc)" \
    --suppress=missingIncludeSystem --suppress=unknownMacro --suppress=nullPointerRedundantCheck \
    --suppress=uninitvar --suppress=invalidPointerCast "${sources[@]}" || failed=1

printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -n 4 sh -c '
    clang-tidy --quiet "$@" -- -std=c17 -I. -Iclient/include -D_GNU_SOURCE -mavx512fp16 -DKLD_RELEASE="\"0\"" -DKLD_BUILD="\"0\"" 2>/dev/null' tidy || failed=1

mapfile -t scripts < <(git ls-files --cached --others --exclude-standard | xargs grep -lE '^#!/bin/(ba)?sh' 2>/dev/null)
shellcheck "${scripts[@]}" || failed=1

mapfile -t python < <(git ls-files --cached --others --exclude-standard '*.py' tests/run | xargs -r ls 2>/dev/null)
# A fixture of pytest is imported by its name and then an argument of that name.
found=$(pyflakes3 "${python[@]}" 2>&1 |
    grep -vE "^tests/(e2e|deploy)/.*(redefinition of unused|'(unixlib|httplib|imagelib)\.[a-z_]+' imported but unused)" || true)
[ -z "$found" ] || { echo "$found"; failed=1; }

exit $failed
