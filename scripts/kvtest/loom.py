"""Loom: runs the models, then each mutant, which its model must refuse.

A mutant is one weakened line, switched on by the environment (KVRAIL_MUTANT=NAME) in a build for
models, so that one build serves all of them.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from . import runner

TABLE = "scripts/mutants.txt"
MUTANT_IN_CODE = re.compile(r'\bmutant\("([^"]+)"\)')
# Longest time for one mutant; a model that finds its fault does so in seconds.
MUTANT_LIMIT_S = 300


@dataclass
class Mutant:
    name: str
    target: str
    model: str


def parse(text):
    """Reads the table: `name target model  # what is weakened`. Returns (mutants, errors)."""
    mutants, errors = [], []
    for number, raw in enumerate(text.splitlines(), 1):
        fields, _, reason = raw.partition("#")
        words = fields.split()
        if not words:
            continue
        where = f"{TABLE}:{number}"
        if len(words) != 3:
            errors.append(f"{where}: {len(words)} fields; write: name target model  # reason")
        elif not reason.strip():
            errors.append(f"{where}: {words[0]} has no reason; say behind # what is weakened")
        elif words[0] in [m.name for m in mutants]:
            errors.append(f"{where}: {words[0]} is there twice")
        else:
            mutants.append(Mutant(*words))
    return mutants, errors


def compare(mutants, sources):
    """Table and code must name the same mutants. `sources` maps a path to its text."""
    in_code = {}
    for path, text in sources.items():
        for name in MUTANT_IN_CODE.findall(text):
            in_code.setdefault(name, path)
    in_table = {m.name for m in mutants}
    errors = [f'{path}: mutant "{name}" has no line in {TABLE}'
              for name, path in sorted(in_code.items()) if name not in in_table]
    errors += [f'{TABLE}: no code has mutant("{name}")'
               for name in sorted(in_table - set(in_code))]
    return errors


def targets():
    """Test programs with models: `lib` when src/ has some, and tests/loom_*.rs."""
    found = [path.stem for path in sorted(Path("tests").glob("loom_*.rs"))]
    inside = any("loom::model" in path.read_text(encoding="utf-8")
                 for path in Path("src").rglob("*.rs"))
    return (["lib"] if inside else []) + found


def select(target):
    return ["--lib"] if target == "lib" else ["--test", target]


def environment(mutant=""):
    flags = f"{os.environ.get('RUSTFLAGS', '')} --cfg loom".strip()
    # Models may state a tighter or wider bound themselves; this one is for those that do not.
    bound = os.environ.get("LOOM_MAX_PREEMPTIONS", "3")
    return {"RUSTFLAGS": flags, "LOOM_MAX_PREEMPTIONS": bound, "KVRAIL_MUTANT": mutant}


def argv(target, *harness):
    cargo = os.environ.get("CARGO", "cargo")
    return [cargo, "test", "-p", "kvrail", "--profile", "loom", *select(target), "--", *harness]


def models(part):
    found = targets()
    if not found:
        return runner.fail("no model: neither tests/loom_*.rs nor loom::model in src/")
    count = runner.Count()
    for target in found:
        # Of the crate's own unit tests only the models run: the others use no loom runtime.
        harness = ["loom"] if target == "lib" else []
        count.add(runner.cargo(part, argv(target, *harness), environment()))
    return count


def judge(mutant, code, output):
    """None when the model refused the mutant, else what went wrong."""
    if code is None:
        return f"{mutant.name}: no verdict in time; the model must fail, not hang"
    ran = [line for line in output.splitlines() if line.startswith(f"test {mutant.model} ")]
    if not ran:
        built = "test result:" in output
        why = "has no such model" if built else "did not build"
        return f"{mutant.name}: {mutant.target} {why} ({mutant.model})"
    if ran[0].endswith("... ok") and code == 0:
        return f"{mutant.name}: SURVIVED: {mutant.model} passed with the weakened line"
    # A model that panics inside a drop aborts the program, which then prints no verdict line.
    died = code not in (0, 1) and "test result:" not in output
    if ran[0].endswith("... FAILED") or died or re.search(r"^test result: FAILED", output, re.M):
        return None
    return f"{mutant.name}: {mutant.model} gave no verdict: {ran[0]}"


def mutants(part):
    table, errors = parse(Path(TABLE).read_text(encoding="utf-8"))
    files = [p for folder in ("src", "tests") for p in Path(folder).rglob("*.rs")]
    errors += compare(table, {str(p): p.read_text(encoding="utf-8") for p in files})
    count = runner.Count()
    for error in errors:
        count.add(runner.fail(error))
    if not table:
        count.add(runner.fail(f"{TABLE} names no mutant"))
    for mutant in table:
        args = argv(mutant.target, "--exact", "--test-threads=1", mutant.model)
        code, output = runner.run(part, args, environment(mutant.name),
                                  MUTANT_LIMIT_S)
        wrong = judge(mutant, code, output)
        count.add(runner.fail(wrong) if wrong else runner.Count(passed=1))
    return count
