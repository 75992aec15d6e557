#!/bin/sh
# Makes build/venv once, with the packages of one set. Runs pip again only when the set, the Python
# or the place changed.
# usage: scripts/venv.sh demo|test
set -eu
cd "$(dirname "$0")/.."
die() { printf 'kvrail: %s\n' "$@" >&2; exit 1; }

set_name=${1:-}
case $set_name in
demo | test) ;;
*) die "venv.sh: unknown set '$set_name'; known: demo test" ;;
esac
python=$(scripts/python.sh)
venv=build/venv
stamp=$venv/kvrail-$set_name.stamp
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# A venv holds absolute paths: a moved or copied folder needs a new one.
wanted=$(printf '%s\n' "$PWD" "$version" "$("$python" -c 'import sys; print(sys.base_prefix)')")
packages=$(cat scripts/requirements-"$set_name".txt)
mkdir -p build
exec 9>build/.venv.lock
flock 9
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted
$packages" ] && "$venv/bin/python" -c pass 2>/dev/null; then
    exit 0
fi
make_venv() {
    rm -rf "$venv"
    "$python" -c 'import venv' 2>/dev/null || die "Python $version has no venv module" \
        "install it: apt-get install python3-venv (or python$version-venv)"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m pip --python "$python" --version >/dev/null 2>&1; then
        # No ensurepip (Debian's python3-venv), but a pip outside that can fill a venv.
        "$python" -m venv --without-pip "$venv"
    else
        die "Python $version can make no virtual environment: ensurepip is missing" \
            "install it: apt-get install python3-venv (or python$version-venv)"
    fi
    echo "$wanted" > "$venv/kvrail-place"
}

[ "$(cat "$venv/kvrail-place" 2>/dev/null)" = "$wanted" ] || make_venv
if "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    pip="$venv/bin/python -m pip"
else
    pip="$python -m pip --python $venv/bin/python"
fi
echo "kvrail: installing into $venv: $(echo "$packages" | grep -v '^#' | tr '\n' ' ')"
# nixl's own dependencies (torch) are gigabytes that nothing here uses.
no_deps=--no-deps
[ "$set_name" = demo ] || no_deps=
$pip install --quiet --disable-pip-version-check $no_deps -r scripts/requirements-"$set_name".txt ||
    die "pip could not install the packages above; its message says why (no network?)"
printf '%s\n%s\n' "$wanted" "$packages" > "$stamp"
