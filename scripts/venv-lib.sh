# Functions that the scripts which make a venv share. The caller defines `die`.

# make_venv PYTHON FOLDER: an empty venv, with or without a pip of its own.
make_venv() {
    mv_version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    rm -rf "$2"
    "$1" -c 'import venv' 2>/dev/null || die "Python $mv_version has no venv module" \
        "install it: apt-get install python3-venv (or python$mv_version-venv)"
    if "$1" -c 'import ensurepip' 2>/dev/null; then
        "$1" -m venv "$2"
    elif "$1" -m pip --python "$1" --version >/dev/null 2>&1; then
        # No ensurepip (Debian's python3-venv), but a pip outside that can fill a venv.
        "$1" -m venv --without-pip "$2"
    else
        die "Python $mv_version can make no virtual environment: ensurepip is missing" \
            "install it: apt-get install python3-venv (or python$mv_version-venv)"
    fi
}

# pip_of PYTHON FOLDER: prints the command line of the pip that fills this venv.
pip_of() {
    if "$2/bin/python" -c 'import pip' 2>/dev/null; then
        echo "$2/bin/python -m pip"
    else
        echo "$1 -m pip --python $2/bin/python"
    fi
}
