#!/bin/bash
# wheel.sh BUILD - BUILD/kld-VERSION-py3-none-manylinux_2_36_x86_64.whl: the package of client/python with
# BUILD/libkld.so and the libraries that it needs beside it (found by $ORIGIN, under names of their own, with
# their licences; libc and its parts stay the system's). One wheel for every Python 3; pip takes it where glibc
# is 2.36 or newer.
# shellcheck disable=SC2016 # $ORIGIN is for others to expand
set -euo pipefail
build=$1
deploy/deps.sh wheel
. deploy/closure.sh # as sbom.sh does
. deploy/sbom.sh
for python in python3 /usr/bin/python3; do
    if "$python" -c 'import setuptools, wheel' 2>/dev/null; then break; fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# licence_of FOLDER NAME PATH: the licence of the Debian package that a library is from, and the texts that it
# refers to, as FOLDER/LICENSE.*; adds a line to FOLDER/LICENSE.bundled.
licence_of() {
    local folder=$1 name=$2 path=$3 owner text
    owner=$(package_of "$path")
    owner=${owner%%[: ]*}
    text=/usr/share/doc/$owner/copyright
    if [ -z "$owner" ] || [ ! -e "$text" ]; then
        echo "wheel.sh: $path is of no Debian package; its licence must come along" >&2
        return 1
    fi
    cp "$text" "$folder/LICENSE.$owner"
    dpkg-query -W -f "$name: \${Package} \${Version}, source \${source:Package} \${source:Version}\n" "$owner" \
        >>"$folder/LICENSE.bundled"
    { grep -o '/usr/share/common-licenses/[A-Za-z0-9.+-]*[A-Za-z0-9]' "$text" || true; } | sort -u | while read -r text; do
        cp -L "$text" "$folder/LICENSE.common-${text##*/}"
    done
}

# names_apart LIBRARY FOLDER: brings what the library loads beside it, each under a name of its own, so that a
# process which has another libssl.so.3, say, of Python's own, keeps the two apart. Licences go to the folder.
names_apart() {
    local library=$1 folder=$2 to name path new file renamed=()
    to=$(dirname "$library")
    echo "Libraries of Debian in this wheel, which the client of HTTP loads; LICENSE.PACKAGE is the licence of each:" \
        >"$folder/LICENSE.bundled"
    while read -r name path; do
        if ! [[ $name =~ $glibc ]]; then
            new=${name%%.so*}-$(sha256sum "$path" | cut -c1-8).so${name#*.so}
            cp -L "$path" "$to/$new"
            chmod 755 "$to/$new"
            renamed+=(--replace-needed "$name" "$new")
            licence_of "$folder" "$new" "$path"
        fi
    done < <(collect "$library")
    for file in "$to"/*; do
        # One thing at a time: patchelf 0.14 mixes up the names otherwise.
        patchelf --set-soname "$(basename "$file")" "$file"
        patchelf "${renamed[@]}" "$file"
        patchelf --set-rpath '$ORIGIN' "$file"
    done
}

lib=$work/lib package=$work/tree/client/python
mkdir -p "$lib" "$work"/{out,tree/client,tree/proto}
# Built from a copy, so that setuptools leaves nothing in the tree, and takes nothing of what pip has left there.
cp -r client/python "$work/tree/client/"
rm -rf "$package"/{build,*.egg-info}
cp LICENSE "$package/"
cp proto/VERSION "$work/tree/proto/"

cp "$build/libkld.so" "$lib/libkld.so.0"
strip --strip-debug "$lib/libkld.so.0"
names_apart "$lib/libkld.so.0" "$package"
check_inside "$lib" "$lib"/* || exit 1

cd "$package"
KLD_BUNDLE="$lib" KLD_PLATFORM=manylinux_2_36_x86_64 "$python" -c '
import sys
from setuptools import build_meta
build_meta.build_wheel(sys.argv[1])' "$work/out" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
cd "$OLDPWD"
wheel=$(basename "$work"/out/*.whl)
cp "$work/out/$wheel" "$build/$wheel"
echo "$build/$wheel: $(du -h "$build/$wheel" | cut -f1)"
