"""Fuzz smoke: builds the targets of fuzz/ with the stable compiler and runs each briefly.

cargo-fuzz is not needed: these are the flags that it passes for `--sanitizer none`.
"""

import os
import re
import subprocess
from pathlib import Path

from . import runner

SECONDS = int(os.environ.get("FUZZ_SECONDS", "20"))
FLAGS = [
    "--cfg fuzzing", "-Cpasses=sancov-module", "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table", "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1", "-Cdebug-assertions", "-Coverflow-checks",
]
DONE = re.compile(r"^Done (\d+) runs in ", re.MULTILINE)


def target_names(manifest):
    """Names of the [[bin]] tables of fuzz/Cargo.toml."""
    bins = manifest.split("[[bin]]")[1:]
    names = [re.search(r'^name\s*=\s*"([^"]+)"', text, re.MULTILINE) for text in bins]
    return [name.group(1) for name in names if name]


def judge(name, code, output):
    """A count for one target's run. A run of no input is a failure."""
    done = DONE.search(output)
    if code != 0 or not done:
        what = "ran out of time" if code is None else f"exit code {code}"
        return runner.fail(f"{name}: {what}; the input is in build/fuzz/{name}/")
    if int(done.group(1)) < 100:
        return runner.fail(f"{name}: only {done.group(1)} inputs were tried")
    return runner.Count(passed=1)


def smoke(part):
    names = target_names(Path("fuzz/Cargo.toml").read_text(encoding="utf-8"))
    if not names:
        return runner.fail("fuzz/Cargo.toml has no [[bin]]")
    text = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = re.search(r"^host: (\S+)", text, re.MULTILINE).group(1)
    target_dir = os.environ.get("CARGO_TARGET_DIR", "target") + "/fuzz"
    # A target is named so that the flags do not reach build scripts.
    build = [os.environ.get("CARGO", "cargo"), "build", "--manifest-path", "fuzz/Cargo.toml",
             "--release", "--bins", "--target", host, "--target-dir", target_dir]
    count = runner.command(part, build, {"RUSTFLAGS": " ".join(FLAGS)})
    if count.failed:
        return count
    count = runner.Count()
    # The part's limit is for the build; a long FUZZ_SECONDS adds to it.
    part.deadline += len(names) * SECONDS
    for name in names:
        work = Path("build/fuzz") / name
        (work / "corpus").mkdir(parents=True, exist_ok=True)
        seeds = Path("fuzz/seeds") / name
        argv = [f"{target_dir}/{host}/release/{name}", f"-max_total_time={SECONDS}", "-timeout=10",
                "-rss_limit_mb=2048", f"-artifact_prefix={work}/", str(work / "corpus")]
        argv += [str(seeds)] if seeds.is_dir() else []
        code, output = runner.run(part, argv, limit_s=SECONDS + 120)
        count.add(judge(name, code, output))
    return count
