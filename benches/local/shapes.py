"""What is measured, and how samples become the table."""

from statistics import median

MIB = 1 << 20


class Shape:
    """`count` descriptors of `size` bytes, `stride` apart: with gaps, so that nothing merges."""

    def __init__(self, count, size, stride, label):
        self.count, self.size, self.stride, self.label = count, size, stride, label
        self.bytes = count * size


SHAPES = {
    shape.label: shape
    for shape in (
        Shape(1, 64 * MIB, 64 * MIB, "1 x 64 MiB"),
        Shape(1000, 64 << 10, 128 << 10, "1,000 x 64 KiB"),
        Shape(10000, 4 << 10, 8 << 10, "10,000 x 4 KiB"),
        Shape(1, 8, 8, "1 x 8 B"),
    )
}
BARE_SHAPE = "1 x 64 MiB"
BUFFER = 128 * MIB  # holds the widest shape with its gaps
FASTER, SAME_CALL, BARE_SHARE = 1.0, 0.98, 0.9  # what the project asks of RBLN


def summarise(samples):
    """{(op, shape, who): [seconds of each pair]} to one row per (op, shape)."""
    rows = []
    for op, label in dict.fromkeys((op, label) for op, label, _ in samples):
        row = {"op": op, "shape": label, "bytes": SHAPES[label].bytes, "seconds": {}, "pairs": {}}
        for who in ("RBLN", "UCX", "bare"):
            values = samples.get((op, label, who))
            row["seconds"][who] = median(values) if values else None
            row["pairs"][who] = values or []
        pairs = row["pairs"]
        row["ucx_over_rbln"] = [ucx / ours for ours, ucx in zip(pairs["RBLN"], pairs["UCX"])]
        row["bare_over_rbln"] = [bare / ours for ours, bare in zip(pairs["RBLN"], pairs["bare"])]
        for name in ("ucx_over_rbln", "bare_over_rbln"):
            row[name + "_median"] = median(row[name]) if row[name] else None
        rows.append(row)
    return rows


def misses(rows, same_call):
    """What falls short of the goal, as texts. `same_call`: UCX makes our system calls here."""
    out = []
    least = SAME_CALL if same_call else FASTER
    for row in rows:
        for name, other, goal in (
            ("ucx_over_rbln", "UCX", least), ("bare_over_rbln", "the bare call", BARE_SHARE),
        ):
            value = row[name + "_median"]
            if value is not None and value < goal:
                out.append(f"{row['op']} {row['shape']}: {value:.3f} of the speed of {other}, "
                           f"the goal is {goal}")
    return out


def _time(seconds):
    if seconds is None:
        return "n/a"
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds:.3f} s"


def _cell(row, who):
    seconds = row["seconds"][who]
    if seconds is None:
        return "n/a"
    speed = f" {row['bytes'] / seconds / 1e9:6.2f} GB/s" if row["bytes"] > MIB else ""
    return _time(seconds) + speed


def _ratio(row, name):
    value = row[name + "_median"]
    if value is None:
        return "n/a"
    return f"{value:.3f} ({min(row[name]):.2f}..{max(row[name]):.2f})"


def table(rows):
    head = ("op", "shape", "RBLN", "UCX", "UCX time / RBLN time", "bare call",
            "bare time / RBLN time")
    body = [
        (row["op"], row["shape"], _cell(row, "RBLN"), _cell(row, "UCX"),
         _ratio(row, "ucx_over_rbln"), _cell(row, "bare"), _ratio(row, "bare_over_rbln"))
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(line, widths)).rstrip()
        for line in [head, *body]
    )
