#!/bin/sh
# Prints the Python to use: $PYTHON, else the first of python3, python3.14 .. python3.10 that is new
# enough.
set -eu
want='3, 10'
new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < ($want))" 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
    if new_enough "$PYTHON"; then echo "$PYTHON"; exit 0; fi
    version=$("$PYTHON" --version 2>&1) || version='does not run'
    echo "kvrail: PYTHON=$PYTHON is no Python 3.10 or newer ($version)" >&2
    exit 1
fi
seen=
for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    command -v "$python" >/dev/null || continue
    if new_enough "$python"; then echo "$python"; exit 0; fi
    version=$("$python" --version 2>&1) || version='does not run'
    seen="$seen $python ($version)"
done
echo "kvrail: Python 3.10 or newer is needed; found:${seen:- none}" >&2
echo "kvrail: install one (apt-get install python3 python3-venv), or name it: make PYTHON=..." >&2
exit 1
