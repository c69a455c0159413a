#!/usr/bin/env bash
# Installs our Debian packages into a bare Debian and uses them there: bare_debian.sh CACHE PACKAGES
#
# CACHE keeps that Debian between runs: debootstrap's minbase of this machine's release, and the one library that the
# program acromion depends on. PACKAGES is a folder with the three packages. dpkg installs them in a copy, without a
# network, and so that what they depend on has to be there; the program, and one that was built with what
# libacromion-dev laid down, run in it by the linker's cache; removed, the packages leave no file. Exits with 77, and
# the reason, where there is no such Debian to be had.
set -euo pipefail
cache=$1 packages=$2
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

skip() { printf 'skipped: %s\n' "$*"; exit 77; }
die() { printf 'bare_debian.sh: %s\n' "$*" >&2; exit 1; }

((EUID == 0)) || skip "a bare Debian is made and entered by root alone"
command -v debootstrap >/dev/null || skip "no debootstrap here: ./run setup test installs it"
# shellcheck source=/dev/null
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
if [[ $(cat "$cache/complete" 2>/dev/null) != "$codename" ]]; then
    rm -rf "$cache"
    mkdir -p "$cache"
    debootstrap --variant=minbase --include=libjansson4 "$codename" "$cache/root" >"$cache/log" 2>&1 ||
        skip "debootstrap made no $codename here: $(tail -n 1 "$cache/log")"
    # Not read here, and copied each time otherwise.
    (cd "$cache/root" && rm -rf var/cache/apt/* var/lib/apt/lists/* usr/share/{doc,locale,man}/*)
    printf '%s' "$codename" >"$cache/complete"
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
cp -a "$cache/root/." "$root"
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"; }
# What there is; dpkg's notes and the linker's cache apart.
files() { (cd "$root" && find . ! -path './var/lib/dpkg/*' ! -path './var/log/*' ! -path './var/cache/*' | sort); }

files >"$cache/before"
mkdir "$root/packages"
cp "$packages"/{libacromion0,libacromion-dev,acromion}_*.deb "$root/packages/"
! inside sh -c 'dpkg --install /packages/libacromion-dev_*.deb' >"$cache/log" 2>&1 ||
    die "libacromion-dev could be installed without libacromion0"
inside sh -c 'dpkg --install /packages/*.deb' >"$cache/log" 2>&1 || die "not installed: $(cat "$cache/log")"
audit=$(inside dpkg --audit)
[[ -z $audit ]] || die "dpkg finds packages broken: $audit"
inside dpkg --verify libacromion0 libacromion-dev acromion
inside ldconfig -p | grep -q 'libacromion\.so\.0 ' || die "the linker's cache does not know libacromion.so.0"

inside acromion check --backend cpu f32:b1:h2:s64:d32
libraries=$(dirname "$(find "$root/usr/lib" -name libacromion.so)")
"${CC:-cc}" -std=c11 -o "$root/packages/first" "$tree/examples/first.c" -I"$root/usr/include" -L"$libraries" -lacromion
inside /packages/first

inside dpkg --purge acromion libacromion-dev libacromion0 >"$cache/log" 2>&1 || die "not removed: $(cat "$cache/log")"
rm -r "$root/packages"
left=$(files | comm -13 "$cache/before" -)
[[ -z $left ]] || die "removed packages left: $left"
echo "installed into a bare $codename, used, removed"
