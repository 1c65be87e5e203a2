#!/bin/bash
# dist.sh BUILD DIST [VARIABLE=...]... - the relocatable tree DIST/ and DIST.tar.gz: programs, libkld, the libraries
# they need beside them (found by $ORIGIN; libc and its parts stay the system's), the kernel table, the tests that run
# without a compiler, and what README.md points at: other READMEs, the examples' sources, what deploy/ has for operators.
# shellcheck disable=SC2016 # $ORIGIN and ${pcfiledir} are for others to expand
set -euo pipefail
build=$1
dist=$2
shift 2
deploy/deps.sh dist
. deploy/closure.sh # as sbom.sh does
. deploy/sbom.sh
command -v patchelf >/dev/null || { echo "dist.sh: patchelf is missing" >&2; exit 1; }

rm -rf "$dist" "$dist.tar.gz"
mkdir -p "$dist"/{bin,lib,libexec,include/kld,share/kld,tests}
MAKEFLAGS="" make --no-print-directory -s "$@" install BUILD="$build" PREFIX=/ DESTDIR="$dist" >/dev/null
# Found from wherever the tree lies.
sed -i 's|^prefix=.*|prefix=${pcfiledir}/../..|' "$dist/lib/pkgconfig/kld.pc"
programs=("$dist/bin/kld-server" "$dist/bin/kld")
for program in "$build/kernel-table" "$build"/examples/* "$build"/bench/*; do
    if [ -f "$program" ] && [ -x "$program" ]; then
        cp "$program" "$dist/libexec/"
        programs+=("$dist/libexec/$(basename "$program")")
    fi
done
cp client/examples/*.py "$dist/libexec/"
cp -r client/python "$dist/"
rm -rf "$dist"/python/{build,*.egg-info} # which pip leaves in the tree
cp proto/VERSION "$dist/python/kld/"
strip --strip-debug "${programs[@]}" "$dist/lib/libkld.so" "$dist/lib/libkld.a"
cp -r tests/e2e tests/data tests/run "$dist/tests/"
[ -d tests/bench ] && cp -r tests/bench "$dist/tests/"
mkdir -p "$dist"/{proto,kernels,server/supervisor,client/examples,deploy}
cp proto/{README.md,openapi.yaml} "$dist/proto/"
for name in kernels server server/supervisor client tests; do
    cp "$name/README.md" "$dist/$name/"
done
cp kernels/TRIED.md "$dist/kernels/"
cp client/examples/*.c "$dist/client/examples/"
ln -s ../../libexec/share.py "$dist/client/examples/"
ln -s ../python "$dist/client/python"
cp -r deploy/{README.md,CHANGELOG.md,compose.yaml,compose.gpu.yaml,config,grafana,haproxy.cfg,kubernetes,mps,prometheus,systemd} \
    "$dist/deploy/"
find "$dist/tests" "$dist/python" -name __pycache__ -prune -exec rm -rf {} +
cp README.md LICENSE "$dist/"
cp LICENSE "$dist/python/"
cp deploy/demo.sh "$dist/demo"
cp deploy/check-gpu.sh "$dist/check-gpu"
echo "$(cat proto/VERSION) ${REVISION:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}" \
    >"$dist/share/kld/VERSION"
cuda=""
if [[ " $* " = *" CUDA=1 "* ]]; then
    cuda=$(cuda_of "$@")
fi
sbom "$(cat proto/VERSION)" "$cuda" "${programs[@]}" "$dist/lib/libkld.so" >"$dist/share/kld/kld.cdx.json"

bring "$dist/lib" "${programs[@]}" "$dist/lib/libkld.so"
for library in "$dist"/lib/*.so*; do
    [ -L "$library" ] || patchelf --set-rpath '$ORIGIN' "$library"
done
for program in "${programs[@]}"; do
    patchelf --set-rpath '$ORIGIN/../lib' "$program"
done

# Every library is now found in the tree or is glibc's.
check_inside "$dist" "${programs[@]}" "$dist"/lib/*.so* || exit 1
# Whoever unpacks it as root keeps the modes, which are not to be those of the builder's umask.
chmod -R u=rwX,go=rX "$dist"
tar -czf "$dist.tar.gz" --owner=0 --group=0 --numeric-owner -C "$(dirname "$dist")" "$(basename "$dist")"
echo "$dist.tar.gz: $(du -h "$dist.tar.gz" | cut -f1)"
