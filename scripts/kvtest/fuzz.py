"""Fuzz smoke: builds the targets of fuzz/ with the stable compiler and runs each briefly.

cargo-fuzz is not needed: these are the flags that it passes for `--sanitizer none`.

environment: FUZZ_SECONDS=N     each target for so long, from what earlier such runs found
             FUZZ_SEED=N        the seed of an earlier run
             FUZZ_SANITIZER=address   with that sanitizer, where the toolchain has it
"""

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

from . import runner

SECONDS = int(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.randrange(1, 1 << 31)
SANITIZER = os.environ.get("FUZZ_SANITIZER", "")
# Inputs of a short run: some seconds on one core.
RUNS = {"blob": 20000, "cabi": 500, "channel": 1500, "handshake": 20000, "nics": 4000, "ops": 20000}
# Inputs that are a list of steps are of use when they are long from the start.
OPTIONS = {
    "cabi": ["-len_control=0", "-max_len=200"],
    "channel": ["-len_control=0", "-max_len=600"],
}
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
        return runner.fail(f"{name}: {what}; the input is in build/fuzz/{name}/; "
                           f"FUZZ_SEED={SEED} runs the same inputs again")
    if int(done.group(1)) < 100:
        return runner.fail(f"{name}: only {done.group(1)} inputs were tried")
    return runner.Count(passed=1)


def arguments(name):
    """Arguments of one target's run: a fixed number of inputs, from the seeds alone, or for a time
    and from what was found before."""
    work = Path("build/fuzz") / name
    corpus = work / ("corpus" if SECONDS else "short")
    if not SECONDS:
        shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = Path("fuzz/seeds") / name
    length = f"-max_total_time={SECONDS}" if SECONDS else f"-runs={RUNS.get(name, 5000)}"
    # A minute for one input is a hang.
    return [length, f"-seed={SEED}", "-timeout=60", "-rss_limit_mb=2048",
            f"-artifact_prefix={work}/", *OPTIONS.get(name, []), str(corpus),
            *([str(seeds)] if seeds.is_dir() else [])]


def smoke(part):
    names = target_names(Path("fuzz/Cargo.toml").read_text(encoding="utf-8"))
    if not names:
        return runner.fail("fuzz/Cargo.toml has no [[bin]]")
    text = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = re.search(r"^host: (\S+)", text, re.MULTILINE).group(1)
    target_dir = os.environ.get("CARGO_TARGET_DIR", "target") + "/fuzz" + SANITIZER
    # A target is named so that the flags do not reach build scripts.
    build = [os.environ.get("CARGO", "cargo"), "build", "--manifest-path", "fuzz/Cargo.toml",
             "--release", "--bins", "--target", host, "--target-dir", target_dir]
    env = {"RUSTFLAGS": " ".join(FLAGS)}
    if SANITIZER:
        env = {"RUSTFLAGS": f"{env['RUSTFLAGS']} -Zsanitizer={SANITIZER}", "RUSTC_BOOTSTRAP": "1"}
    count = runner.command(part, build, env)
    if count.failed:
        return count
    count = runner.Count()
    print(f"      seed {SEED}: FUZZ_SEED={SEED} runs the same inputs again", flush=True)
    # The part's limit is for the build; a long FUZZ_SECONDS adds to it.
    part.deadline += len(names) * SECONDS
    for name in names:
        argv = [f"{target_dir}/{host}/release/{name}", *arguments(name)]
        code, output = runner.run(part, argv, limit_s=SECONDS + 600)
        count.add(judge(name, code, output))
    return count
