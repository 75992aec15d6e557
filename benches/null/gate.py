"""Compares counts with the budget that is committed: `benches/budget.json`, which has a section
for each bench, {section: {case: {figure: most that is allowed}}}."""

import json
from pathlib import Path

BUDGET = Path(__file__).resolve().parents[1] / "budget.json"
SECTION = "null"
# What a case may be held to: instructions a descriptor, and calls a round.
FIGURES = {
    "instructions": lambda f: f["instructions"]["sum"],
    "doorbells": lambda f: f["bells"],
    "signals": lambda f: f["signals"],
    "work_requests": lambda f: f["work_requests"],
    "allocations": lambda f: f["allocations"],
}


def read():
    return json.loads(BUDGET.read_text()) if BUDGET.exists() else {}


def verdicts(seen, budget, known=FIGURES):
    """(fine, text) for each figure of the budget, and for each case that is not there. A figure of
    `known` that is None is none of that case."""
    figures = {f["case"]: f for f in seen}
    for case in [*budget, *(c for c in figures if c not in budget)]:
        if case not in figures or case not in budget:
            what = "was not measured" if case in budget else "has no budget"
            yield False, f"{case}: it {what}; set the budget anew (--set-budget PERCENT)"
            continue
        for name, most in budget[case].items():
            value = known[name](figures[case]) if name in known else None
            if value is None:
                yield False, f"{case}: `{name}` is no figure of it; known: {', '.join(known)}"
                continue
            fine = value <= most
            end = "" if fine else ": OVER the budget; profile it with --profile 20"
            yield fine, f"{case}: {name} {value:.1f}, allowed {most:.1f}{end}"


def judge(seen, section=SECTION, known=FIGURES):
    """Prints each figure beside its limit; the exit code."""
    passed = failed = 0
    notes = []
    for fine, text in verdicts(seen, read().get(section, {}), known):
        print(text)
        passed, failed = passed + fine, failed + (not fine)
        if not fine:
            notes.append(text)
    for note in notes:
        print(f"  {note}")
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed or not passed else 0


def store(seen, percent, section=SECTION, known=FIGURES):
    """Writes what was seen and some percent more into the section; the others stay."""
    budget = read()
    more = 1 + percent / 100
    budget[section] = {f["case"]: {name: round(value * more + 0.05, 1)
                                   for name, get in known.items()
                                   if (value := get(f)) is not None} for f in seen}
    BUDGET.write_text(json.dumps(budget, indent=1, sort_keys=True) + "\n")
    return 0
