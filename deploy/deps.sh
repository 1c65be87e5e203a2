#!/bin/sh
# deps.sh SET... - installs the Debian packages that a target of the Makefile needs and that are
# missing. Sets: build check lint fuzz valgrind coverage dist wheel deploy. Asks for nothing and changes nothing if all are there.
set -eu
wanted=""
for set in "$@"; do
    case $set in
    build) wanted="$wanted gcc libc6-dev libmicrohttpd-dev libgnutls28-dev libseccomp-dev libcjson-dev \
        libuv1-dev zlib1g-dev libcurl4-openssl-dev" ;;
    check) wanted="$wanted g++ check libsubunit-dev pkg-config patchelf curl python3 python3-numpy \
        python3-pytest python3-pytest-timeout python3-venv python3-setuptools python3-wheel python3-torch \
        openssl util-linux chromium mandoc" ;;
    lint) wanted="$wanted clang-format clang-tidy cppcheck shellcheck pyflakes3" ;;
    fuzz) wanted="$wanted clang libclang-rt-dev" ;;
    valgrind) wanted="$wanted valgrind" ;;
    coverage) wanted="$wanted gcovr" ;;
    dist) wanted="$wanted patchelf" ;;
    wheel) wanted="$wanted patchelf python3 python3-setuptools python3-wheel" ;;
    deploy)
        wanted="$wanted buildah debootstrap util-linux python3-yaml python3-seccomp systemd systemd-container \
            prometheus haproxy"
        # Others bring a kubectl of their own, which Debian's would collide with.
        command -v kubectl >/dev/null || wanted="$wanted kubernetes-client"
        ;;
    *)
        echo "deps.sh: no set '$set'" >&2
        exit 2
        ;;
    esac
done

if ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: not Debian; the packages are called there:$wanted" >&2
    exit 0
fi
missing=""
for package in $wanted; do
    # A line for each architecture that it is there for.
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -qx 'install ok installed' ||
        missing="$missing $package"
done
[ -n "$missing" ] || exit 0

sudo=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || {
        echo "deps.sh: missing packages, and neither root nor sudo to install them:$missing" >&2
        exit 1
    }
    sudo=sudo
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
# What is installed for its programs is not to be started as a service (the policy of invoke-rc.d).
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap '$sudo rm -f $policy' EXIT
    # dash runs that of EXIT only where no signal ends it.
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    printf '#!/bin/sh\nexit 101\n' | $sudo tee $policy >/dev/null
    $sudo chmod 755 $policy
fi
$sudo apt-get update -qq -o Acquire::Retries=5
# shellcheck disable=SC2086 # a list of words
$sudo apt-get install -y -qq -o Acquire::Retries=5 -o Dpkg::Use-Pty=0 --no-install-recommends $missing >/dev/null
