"""The table of the bench, as text and as Markdown."""

import platform
from pathlib import Path

HEAD = ("engine", "instructions", "ns, median", "ns, least", "of the loop", "post_send",
        "signalled", "mallocs")
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def machine():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def figure(value, digits=3):
    """About three digits that count: 5321, 66.1, 1.04, 0.0157."""
    if value is None:
        return "-"
    # Below one in ten thousand it is what one run had and the other had not.
    if abs(value) < 2e-4:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def cells(row, size):
    point = row["points"][str(size)]
    counts, instructions = point.get("counts", {}), point.get("instructions", {})
    return [row["label"], figure(instructions.get("sum")), figure(point["ns"]),
            figure(point["least"]), f"{figure(point['ratio'])}x",
            *(figure(counts.get(key)) for key in ("posts", "signalled", "mallocs"))]


def dates(result):
    """Days, and the commits that were measured on them."""
    days = " and ".join(sorted({row["date"] for row in result["rows"]}))
    commits = sorted({row["commit"] for row in result["rows"] if row.get("commit")})
    return days + (f" (commit {', '.join(commits)})" if commits else "")


def about(result):
    return (f"{result['op']} of {result['table']:,} descriptors of {result['bytes']} B, for each "
            f"descriptor; {result['machine']}, {result['cores']} cores, {dates(result)}, "
            f"{result['pairs']} pairs, load average {result['load']:.1f} before it")


def text(result):
    rows = [cells(row, result["table"]) for row in result["rows"]]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows)]
    lines = [about(result)]
    for row in (HEAD, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)


def markdown(result):
    lines = [about(result) + ":", "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(cells(row, result["table"])) + " |" for row in result["rows"]]
    sizes = sorted({int(size) for row in result["rows"] for size in row["points"]})
    head = [f"{size:,}" for size in sizes]
    lines += ["", "Instructions / median nanoseconds a descriptor, by the number of descriptors:",
              "", "| engine | " + " | ".join(head) + " |", "|---" * (len(sizes) + 1) + "|"]
    for row in (row for row in result["rows"] if row["line"]):
        both = []
        for point in (row["points"].get(str(size), {}) for size in sizes):
            instructions = point.get("instructions", {}).get("sum")
            both.append(f"{figure(instructions)} / {figure(point.get('ns'))}")
        lines.append(f"| {row['label']} | " + " | ".join(both) + " |")
    for what, reasons in (("Skipped", result["skipped"]), ("Failed", result["failed"])):
        lines += ["", *(f"{what}: {name}, {why.splitlines()[0]}." for name, why in reasons.items())]
    return "\n".join(lines).rstrip()


def renew(path, result):
    """Puts the tables between the two comments of a document."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"bench: {path} has no lines {BEGIN} and {END} to put the tables between")
    path.write_text(f"{before}{BEGIN}\n{markdown(result)}\n{END}{after}")
