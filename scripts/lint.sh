#!/bin/bash
# Formatting, clippy with every feature set, documentation, and the syntax of the scripts. Runs all
# of them, then fails when one failed.
# usage: scripts/lint.sh [FEATURE ...]   features of the root crate to lint one by one
set -u
cd "$(dirname "$0")/.." || exit 1
cargo=${CARGO:-cargo}
passed=0 failed=()

check() {
    local name=$1
    shift
    echo "lint: $name"
    if "$@"; then passed=$((passed + 1)); else failed+=("$name"); fi
}

clippy() { "$cargo" clippy --quiet "$@" -- -D warnings; }
shell_syntax() {
    local bad=0 file
    while IFS= read -r file; do
        bash -n "$file" || bad=1
    done < <(echo .ci/run; find scripts bindings tests benches -name '*.sh' 2>/dev/null)
    return $bad
}
python_syntax() {
    local python
    python=$(scripts/python.sh) || return 1
    # Compiles each file in memory: nothing is written beside the sources.
    find scripts bindings benches tests examples -name '*.py' -print0 2>/dev/null |
        xargs -0 -r "$python" -c '
import sys
bad = 0
for path in sys.argv[1:]:
    try:
        compile(open(path, encoding="utf-8").read(), path, "exec")
    except SyntaxError as e:
        bad = 1
        print(f"{path}:{e.lineno}: {e.msg}", file=sys.stderr)
sys.exit(bad)'
}

check "cargo fmt --all --check" "$cargo" fmt --all --check
check "clippy, default features" clippy --workspace --all-targets
check "clippy, no default features" clippy -p kvrail --no-default-features --lib
for feature in "$@"; do
    check "clippy, no_std with $feature" \
        clippy -p kvrail --no-default-features --features "$feature" --lib
done
check "clippy, all features" clippy --workspace --all-targets --all-features
check "clippy under loom" env RUSTFLAGS="--cfg loom" "$cargo" clippy --quiet -p kvrail \
    --profile loom --all-features --lib --tests -- -D warnings
[ ! -f fuzz/Cargo.toml ] || {
    check "cargo fmt, fuzz" "$cargo" fmt --manifest-path fuzz/Cargo.toml --check
    check "clippy, fuzz" \
        clippy --manifest-path fuzz/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}/fuzz"
}
check "cargo doc" env RUSTDOCFLAGS="-D warnings" \
    "$cargo" doc --quiet -p kvrail -p kvrail-verbs-sys --all-features --no-deps
check "shell syntax" shell_syntax
check "python syntax" python_syntax

[ ${#failed[@]} -eq 0 ] || printf 'lint failed: %s\n' "${failed[@]}"
echo "lint: $passed passed, ${#failed[@]} failed"
[ ${#failed[@]} -eq 0 ]
