#!/bin/sh
# Makes build/venv once, with the packages of one set. Runs pip again only when the set, the Python
# or the place changed.
# usage: scripts/venv.sh demo|test
set -eu
cd "$(dirname "$0")/.."
die() { printf 'kvrail: %s\n' "$@" >&2; exit 1; }
. scripts/venv-lib.sh

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
[ "$(cat "$venv/kvrail-place" 2>/dev/null)" = "$wanted" ] || {
    make_venv "$python" "$venv"
    echo "$wanted" > "$venv/kvrail-place"
}
pip=$(pip_of "$python" "$venv")
echo "kvrail: installing into $venv: $(echo "$packages" | grep -v '^#' | tr '\n' ' ')"
# nixl's own dependencies (torch) are gigabytes that nothing here uses.
no_deps=--no-deps
[ "$set_name" = demo ] || no_deps=
$pip install --quiet --disable-pip-version-check $no_deps -r scripts/requirements-"$set_name".txt ||
    die "pip could not install the packages above; its message says why (no network?)"
printf '%s\n%s\n' "$wanted" "$packages" > "$stamp"
