#!/bin/bash
# sbom.sh - sourced by dist.sh: the bill of materials of a tree, in CycloneDX's JSON, which scanners of
# images find by its name. It names what the tree brings along, by Debian package and version; what
# the system has under it, its own package list names.
. deploy/closure.sh

# package_of PATH: `name version` of the package that a library is from; nothing where that is not known.
package_of() {
    local path name
    command -v dpkg-query >/dev/null || return 0
    # A library may be known by its path before or after /lib became a link to /usr/lib.
    for path in "$1" "$(realpath "$1")" "/usr$1" "$(realpath "$1" | sed 's|^/usr/|/|')"; do
        name=$(dpkg-query -S "$path" 2>/dev/null | grep -v '^diversion ' | head -1 | sed 's/: .*//') || true
        if [ -n "$name" ]; then
            # shellcheck disable=SC2016 # dpkg expands them
            dpkg-query -W -f '${binary:Package} ${Version}\n' "$name"
            return 0
        fi
    done
}

# component NAME VERSION PURL FILE: one entry; an empty VERSION or PURL is left out.
component() {
    printf ',\n  {"type": "library", "name": "%s"' "$1"
    [ -z "$2" ] || printf ', "version": "%s"' "$2"
    [ -z "$3" ] || printf ', "purl": "%s"' "$3"
    printf ', "properties": [{"name": "kld:file", "value": "%s"}]}' "$4"
}

# cuda_of [VARIABLE=...]...: the version of the CUDA toolkit that make, given these, compiles with.
cuda_of() {
    local nvcc
    nvcc=$(MAKEFLAGS="" make --no-print-directory -s "$@" print-nvcc) || return
    "$nvcc" --version | sed -n 's/.*release [^,]*, V//p'
}

# sbom VERSION CUDA FILE...: the libraries that the files load, but for glibc's and libkld. CUDA: the version of
# its runtime, which is linked into libkld; empty: none. To be called before they find those of the tree.
sbom() {
    local version=$1 cuda=$2 name path package release distribution
    shift 2
    # shellcheck source=/dev/null
    distribution=$(. /etc/os-release && echo "$ID $VERSION_ID")
    printf '{"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,\n "metadata": {"component":\n'
    printf '  {"type": "application", "name": "kld", "version": "%s", "licenses": [{"license": {"id": "MIT"}}]}},\n' \
        "$version"
    printf ' "components": [' # the first comma falls to no entry
    {
        collect "$@" | while read -r name path; do
            if ! [[ $name =~ $glibc ]] && [[ $name != libkld.* ]]; then
                read -r package release <<<"$(package_of "$path")"
                package=${package%%:*}
                component "${package:-$name}" "$release" \
                    "${package:+pkg:deb/${distribution% *}/$package@$(sed 's/:/%3A/g; s/+/%2B/g' <<<"$release")?arch=amd64&distro=${distribution/ /-}}" \
                    "lib/$name"
            fi
        done
        [ -z "$cuda" ] || component cudart "$cuda" "" lib/libkld.so
    } | sed '1{/^,$/d}'
    printf '\n ]\n}\n'
}
