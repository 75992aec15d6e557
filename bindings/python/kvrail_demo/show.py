"""The progress bar and the table, in plain text."""

import sys
import time

PHASES = {"fill": "filling", "hold": "waiting", "move": "moving", "check": "checking"}


def size(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024


class Bar:
    """One line on a terminal, one line a phase elsewhere. Both workers add up in it."""

    def __init__(self, out=sys.stderr):
        self.out, self.live = out, out.isatty()
        self.phase, self.parts, self.shown, self.note = None, {}, 0.0, ""

    def update(self, role, phase, done, total, note=""):
        if phase != self.phase and phase in PHASES:
            self.finish()
            self.phase, self.parts = phase, {}
        # Filling and checking add up over both sides; what moves is the same bytes on both.
        if phase == "move":
            role, done = phase, max(done, self.parts.get(phase, (0, 0))[0])
        self.parts[role] = (done, total)
        now = time.monotonic()
        if self.live and (now - self.shown > 0.05 or done >= total):
            self.shown, self.note = now, note
            self.out.write("\r" + self.line() + "\x1b[K")
            self.out.flush()

    def line(self):
        done = sum(part[0] for part in self.parts.values())
        total = sum(part[1] for part in self.parts.values()) or 1
        full = 30 * done // total
        text = f"{PHASES[self.phase]:<9}[{'#' * full}{'.' * (30 - full)}] {100 * done // total:3}%"
        if self.phase != "hold":
            text += f"  {size(done)} of {size(total)}"
        return text + (f"  {self.note}" if self.note else "")

    def finish(self):
        if self.phase is not None:
            line = self.line()
            self.out.write(f"\r{line}\x1b[K\n" if self.live else f"{line}\n")
            self.out.flush()
        self.phase = None

    def say(self, text):
        """A line above the bar."""
        self.out.write(f"\r{text}\x1b[K\n" if self.live else f"{text}\n")
        self.out.flush()


def table(report):
    """The result as rows of name and value."""
    def count(value):
        return "n/a" if value is None else f"{value:,}"

    note = report["notification"]
    heads = f"{report['kv_heads']} KV heads x {report['head_dim']}"
    blocks = report["blocks"]
    rows = [
        ("model", f"{report['model']}, {report['layers']} layers, {heads} (rank 0 of tp "
                  f"{report['tp']}), bf16"),
        ("request", f"{report['tokens']:,} tokens = {blocks['used']:,} blocks of "
                    f"{report['block_size']} tokens a layer (of {blocks['prefill']:,} at prefill, "
                    f"{blocks['decode']:,} at decode)"),
        ("path", f"{report['direction']}, backend {report['backend']}, transport "
                 f"{report['transport'] or 'n/a'}"),
        ("bytes", f"{report['bytes']:,} ({size(report['bytes'])})"),
        ("descriptors", f"{report['descriptors']:,} pairs, {report['merged_descriptors']:,} after "
                        f"NIXL's merging"),
        ("work requests", f"{count(report['work_requests'])} after coalescing"),
        ("time", f"{report['seconds'] * 1e3:.2f} ms from post to done = "
                 f"{report['gb_per_s']:.2f} GB/s"),
        ("time in post", f"{report['post_us']:.1f} us in transfer(), of it in the engine "
                         + ("n/a" if report["engine_post_us"] is None
                            else f"{report['engine_post_us']:.1f} us")),
    ]
    for rail in report["rails"] or ():
        bar = "#" * round(20 * rail["share"])
        rows.append((f"rail {rail['name']}", f"{100 * rail['share']:5.1f}% {bar:<20} "
                     f"{size(rail['bytes']):>10}, {rail['work_requests']:,} WRs, "
                     f"{rail['claims']:,} claims"))
    if report["rails"] is None:
        rows.append(("rails", "n/a"))
    rows += [
        ("notification", f"'{note['text']}' from {note['from']}, seen by {note['by']} after the "
                         f"data"),
        ("check", f"{report['check']['compared']:,} bytes compared, all right; "
                  f"{report['check']['untouched']:,} bytes beside them untouched"),
        ("seed", f"{report['seed']}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
