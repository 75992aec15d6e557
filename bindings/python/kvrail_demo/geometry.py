"""Shapes: what a model's KV cache looks like on one tensor-parallel rank, and what it costs."""

from dataclasses import asdict, dataclass
from pathlib import Path

BF16 = 2
# Two Python processes with numpy and NIXL, their scratch blocks and their agents, measured.
FIXED_BYTES = 320 << 20
# NIXL's tables on the initiator, for each block of either side, and numpy's copy of them.
TABLE_BYTES = 160


class DoesNotFit(Exception):
    """A shape that cannot be made here; the text has the numbers and the flag to change."""


@dataclass(frozen=True)
class Model:
    layers: int
    kv_heads: int
    head_dim: int
    default_tokens: int  # a run of a few seconds in less than 2 GiB at tp 1


MODELS = {
    "qwen3-0.6b": Model(28, 8, 128, 4096),
    "llama-3.1-8b": Model(32, 8, 128, 4096),
    "llama-3.1-70b": Model(80, 8, 128, 1536),
}


@dataclass(frozen=True)
class Plan:
    """One rank's share. Each layer is one region of [blocks][block_bytes] on either side."""

    model: str
    layers: int
    kv_heads: int  # on this rank
    head_dim: int
    tp: int
    tokens: int
    block_size: int
    used: int  # blocks that move, per layer
    prefill_blocks: int  # blocks that exist, per layer
    decode_blocks: int

    @property
    def block_bytes(self):
        """K and V of block_size tokens, packed."""
        return 2 * self.kv_heads * self.block_size * self.head_dim * BF16

    @property
    def descriptors(self):
        return self.layers * self.used

    @property
    def bytes(self):
        return self.descriptors * self.block_bytes

    @property
    def memory(self):
        """Bytes that both processes take together."""
        blocks = self.layers * (self.prefill_blocks + self.decode_blocks)
        return blocks * (self.block_bytes + TABLE_BYTES) + FIXED_BYTES

    def blocks(self, role):
        return self.prefill_blocks if role == "prefill" else self.decode_blocks

    def to_dict(self):
        return asdict(self)


def make_plan(model, tokens, block_size, tp):
    """The plan for these flags. Raises ValueError with the value seen and the values allowed."""
    shape = MODELS[model]
    tokens = shape.default_tokens if tokens is None else tokens
    for flag, value in (("--tokens", tokens), ("--block-size", block_size), ("--tp", tp)):
        if value < 1:
            raise ValueError(f"{flag} is {value}, it must be at least 1")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ValueError(
            f"--tp is {tp}, but {model} has {shape.kv_heads} KV heads: tp must divide "
            f"{shape.kv_heads} or be a multiple of it (then a head is replicated)"
        )
    used = -(-tokens // block_size)
    # Spare blocks on both sides, in different numbers: a wrong index must have somewhere to go.
    plan = Plan(
        model, shape.layers, max(1, shape.kv_heads // tp), shape.head_dim, tp, tokens, block_size,
        used, used + max(2, used // 5), used + max(3, used // 4),
    )
    largest = plan.layers * max(plan.prefill_blocks, plan.decode_blocks)
    if largest >= 1 << 32:
        raise DoesNotFit(
            f"--tokens {tokens} with --block-size {block_size} makes {largest} descriptors, and "
            f"NIXL indexes them with 32 bits ({(1 << 32) - 1}): use a larger --block-size"
        )
    return plan


def available_bytes(proc="/proc", cgroup="/sys/fs/cgroup"):
    """Memory that can still be taken: the machine's, or the control group's if that is less."""
    known = []
    try:
        for line in Path(proc, "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                known.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    for limit, now in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            room = int(Path(cgroup, limit).read_text()) - int(Path(cgroup, now).read_text())
            known.append(max(0, room))
        except (OSError, ValueError):  # no such file, or "max": no limit
            pass
    return min(known) if known else None


def check_memory(plan, available):
    """Refuses a plan that would not fit, before anything is allocated."""
    if available is None or plan.memory <= available * 9 // 10:
        return
    gib = 1 << 30
    room = available * 9 // 10 - FIXED_BYTES
    best = plan.tokens * room // max(1, plan.memory - FIXED_BYTES) * 95 // 100
    best = best // plan.block_size * plan.block_size
    if best >= plan.block_size:
        advice = f"use --tokens {best} or less"
    else:
        advice = "not even one block fits: use a smaller --block-size"
    if plan.kv_heads > 1:
        advice += f", or a larger --tp (up to {plan.tp * plan.kv_heads} for this model)"
    raise DoesNotFit(
        f"{plan.model} with --tokens {plan.tokens} --block-size {plan.block_size} --tp {plan.tp} "
        f"needs {plan.memory / gib:.2f} GiB (KV cache of {plan.bytes / gib:.2f} GiB plus spare "
        f"blocks, in two processes), and 9/10 of the {available / gib:.2f} GiB available here may "
        f"be taken: {advice}"
    )
