"""The bytes of the blocks: every 64-bit word follows from seed, kind, layer, block and its index.

A block is `ramp + key`: the ramp is one odd multiple of the word index, the key a 64-bit mix of
where the block lives. Filling and checking cost one addition a word, and a block that is shifted,
swapped, torn or left alone differs from the one expected.
"""

import numpy as np

DATA, CANARY, FREED = 1, 2, 3  # kinds: a KV block, a block never written, a block given back
_RAMP = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 4 << 20  # bytes made and compared at a time: fits the last-level cache


def _mix(words):
    """The finaliser of splitmix64: each input bit reaches every output bit."""
    words = words ^ (words >> np.uint64(30))
    words = words * np.uint64(0xBF58476D1CE4E5B9)
    words = words ^ (words >> np.uint64(27))
    words = words * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keys(seed, kind, layer, blocks):
    """One key for each block."""
    start = np.array([(seed << 2 | kind) & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
    place = (np.uint64(layer + 1) << np.uint64(40)) + np.asarray(blocks, np.uint64)
    return _mix(_mix(start) + place * _RAMP)


class Pattern:
    """Makes and compares blocks of one size."""

    def __init__(self, seed, block_bytes):
        if block_bytes % 8:
            raise ValueError(f"a block of {block_bytes} bytes is not a whole number of words")
        self.seed = seed
        self.words = block_bytes // 8
        self.ramp = np.arange(self.words, dtype=np.uint64) * _RAMP
        rows = max(1, _CHUNK // block_bytes)
        self.scratch = np.empty((rows, self.words), np.uint64)

    def fill(self, region, kind, layer, blocks=None):
        """Writes the blocks (all, those of a slice, or those named) of a layer's region
        [blocks][words]."""
        if blocks is None or isinstance(blocks, slice):
            blocks = blocks or slice(None)
            rows = keys(self.seed, kind, layer, np.arange(len(region))[blocks])
            np.add(self.ramp[None, :], rows[:, None], out=region[blocks])
            return
        for block, key in zip(blocks, keys(self.seed, kind, layer, blocks)):
            np.add(self.ramp, key, out=region[block])

    def first_words(self, kind, layer, blocks):
        """Word 0 of each block: tells cheaply whether a block was written."""
        return keys(self.seed, kind, layer, blocks)

    def compare(self, region, blocks, kind, layer, origin):
        """Compares every byte of `blocks` with the pattern of (`layer`, `origin`).

        Returns one text for each block that differs, naming its first wrong byte."""
        wrong = []
        blocks, origin = np.asarray(blocks, np.int64), np.asarray(origin, np.int64)
        step = len(self.scratch)
        for at in range(0, len(blocks), step):
            part, source = blocks[at : at + step], origin[at : at + step]
            want = self.scratch[: len(part)]
            rows = keys(self.seed, kind, layer, source)
            np.add(self.ramp[None, :], rows[:, None], out=want)
            bad = (region[part] != want).any(axis=1)
            for row in np.flatnonzero(bad):
                got = region[part[row]]
                wrong.append(self._describe(got, want[row], layer, part[row], source[row], kind))
        return wrong

    @staticmethod
    def _describe(got, want, layer, block, source, kind):
        got_bytes, want_bytes = got.view(np.uint8), want.view(np.uint8)
        at = int(np.flatnonzero(got_bytes != want_bytes)[0])
        count = int(np.count_nonzero(got_bytes != want_bytes))
        what = {DATA: f"block {source} of the sender", CANARY: "its untouched pattern"}.get(kind)
        return (
            f"layer {layer} block {block}: {count} bytes differ from {what}, the first at offset "
            f"{at} (is {int(got_bytes[at]):#04x}, should be {int(want_bytes[at]):#04x})"
        )
