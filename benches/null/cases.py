"""What is measured: the reference work W and what differs from it in one thing."""

from dataclasses import dataclass, field

import shapes


@dataclass(frozen=True)
class Case:
    name: str
    op: str = "write"
    kind: str = "fresh"
    order: str = "random"
    # [(regions, bytes, blocks of a region)], of which `descs` are taken.
    groups: list = field(default_factory=list)
    descs: int = 10_000
    requests: int = 1

    @property
    def total(self):
        """Descriptors of a round."""
        return self.descs * self.requests

    @property
    def regions(self):
        return sum(regions for regions, _, _ in self.groups)

    @property
    def bytes(self):
        """Of a round."""
        if len(self.groups) == 1:
            return self.total * self.groups[0][1]
        return self.requests * sum(r * b * n for r, b, n in self.groups)

    def arguments(self):
        """For `null-work`, all but the rounds."""
        text = ",".join(":".join(map(str, group)) for group in self.groups)
        return [f"op={self.op}", f"kind={self.kind}", f"order={self.order}", f"groups={text}",
                f"descs={self.descs}", f"requests={self.requests}"]


def plain(name, descs=10_000, length=1024, regions=1, **other):
    """Blocks of one length, spread over so many regions."""
    blocks = -(-descs // regions)
    return Case(name, groups=[(regions, length, blocks)], descs=descs, **other)


def shape(model, tokens, page, requests):
    groups = shapes.groups(model, tokens, page)
    return Case(shapes.title(model, tokens, page, requests), order="layers", groups=groups,
                descs=sum(r * n for r, _, n in groups), requests=requests)


SIZES = [(64, "64 B"), (256, "256 B"), (4_096, "4 KiB"), (16_384, "16 KiB"), (65_536, "64 KiB"),
         (262_144, "256 KiB"), (1 << 20, "1 MiB")]

ALL = [
    plain("W write fresh"),
    plain("W read fresh", op="read"),
    plain("W write again", kind="again"),
    plain("W read again", op="read", kind="again"),
    *(plain(f"{n} write", descs=n) for n in (1, 64, 256, 1_000, 100_000)),
    *(plain(f"{n} read", descs=n, op="read") for n in (1, 64, 256, 1_000, 100_000)),
    *(plain(f"{n} regions", regions=n) for n in (16, 256, 4_096)),
    *(plain(f"{n} regions read", regions=n, op="read") for n in (16, 256, 4_096)),
    plain("contiguous", order="contiguous"),
    plain("contiguous read", order="contiguous", op="read"),
    plain("gather", order="gather"),
    plain("gather read", order="gather", op="read"),
    *(plain(f"{text} blocks", length=n, descs=1_000 if n >= 262_144 else 10_000)
      for n, text in SIZES),
    *(plain(f"{text} blocks read", length=n, descs=1_000 if n >= 262_144 else 10_000, op="read")
      for n, text in SIZES),
    *(shape(*s) for s in shapes.SHAPES),
]

# The cases of the gate: goals 1, 2, 7, and those by which flatness shows.
GATE = ["W write fresh", "W read fresh", "W write again", "64 write", "100000 write", "16 regions",
        "4096 regions", "contiguous", "gather"]
