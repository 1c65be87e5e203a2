#!/bin/bash
# closure.sh - sourced by dist.sh and wheel.sh: which libraries a program brings along.

# What stays the system's: glibc, which must fit the running kernel's loader.
glibc='^(linux-vdso|ld-linux-x86-64|libc|libm|libpthread|libdl|librt|libresolv|libutil|libanl)\.'

# collect FILE...: what they load, as lines `name path`.
collect() {
    ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u
}

# bring FOLDER FILE...: copies what they load into the folder, but for glibc.
bring() {
    local to=$1 name path
    shift
    collect "$@" | while read -r name path; do
        if ! [[ $name =~ $glibc ]] && [ ! -e "$to/$name" ]; then
            cp -L "$path" "$to/$name"
            chmod 755 "$to/$name"
        fi
    done
}

# check_inside FOLDER FILE...: fails, naming it, if one of them loads what is neither there nor glibc's.
check_inside() {
    local folder name path missing
    folder=$(realpath "$1")
    shift
    missing=$(ldd "$@" | awk '$2 == "=>" && $3 == "not" {print $1 " (not found)"}' | sort -u)
    missing=$missing${missing:+$'\n'}$(collect "$@" | while read -r name path; do
        case $(realpath "$path") in
        "$folder"/*) ;;
        *) [[ $name =~ $glibc ]] || echo "$name ($path)" ;;
        esac
    done | sort -u)
    [ -z "$missing" ] || echo "found outside: $missing" >&2
    [ -z "$missing" ]
}
