"""What is where: the pattern of a model's cache, and how a rank of an engine lays it out.

A word is 8 bytes, four values of 16 bits. Each has its own value, made from its layer, K or V,
block, head, token and place in the head: whatever is out of place shows.
"""

import random

HEADS, HEAD_SIZE, TOKENS = 8, 128, 1024  # of the model; tokens of a block
LATENT = 576  # values of a token in the cache of a model with MLA, which has nothing else


def model(case):
    """Parts (K and V, or the latent alone), heads and words of a head."""
    return (1, 1, LATENT // 4) if case["mla"] else (2, HEADS, HEAD_SIZE // 4)


def heads_of(case, rank):
    """The heads of a rank. A latent is of all ranks."""
    if case["mla"]:
        return range(1)
    heads = HEADS // rank.tp_size
    return range(rank.tp * heads, (rank.tp + 1) * heads)


def count(case):
    """Blocks of a request."""
    return -(-case["tokens"] // TOKENS)


def blocks(case):
    """Blocks of a cache: those of all requests, and some that nobody may touch."""
    return case["requests"] * count(case) + 3


def block_lists(case, consumer=0, at=0):
    """Block ids of request number `at` at the producer and at this consumer, a list for each KV
    group."""
    n = count(case)
    theirs = list(range(1, 1 + case["requests"] * n))
    ours = list(range(blocks(case) - case["requests"] * n, blocks(case)))
    if case["order"] == "reversed":
        ours.reverse()
    elif case["order"] == "random":
        random.Random(7 + consumer).shuffle(ours)
        random.Random(80 + consumer).shuffle(theirs)
    theirs = theirs[consumer:] + theirs[:consumer]
    theirs, ours = theirs[at * n:(at + 1) * n], ours[at * n:(at + 1) * n]
    if not case["window"]:
        return (theirs,), (ours,)
    last = blocks(case) - 1
    return (theirs, [last - 1, last]), (ours, [0, 1])


def pattern(case, rank, layer, life=0, tokens=None):
    """int64 [K or V, block, head, token, word], the heads of this rank.

    tokens: what lies behind so many tokens of the producer's request is 0.
    """
    import torch

    parts, heads, words = model(case)
    place = torch.tensor(layer + 64 * life, dtype=torch.int64)
    for size, values in ((parts, range(parts)), (4096, range(blocks(case))),
                         (heads, heads_of(case, rank)), (TOKENS, range(TOKENS)),
                         (words, range(words))):
        place = place.unsqueeze(-1) * size + torch.tensor(values, dtype=torch.int64)
    x = (place + 1) * -7046029254386353131
    x ^= (x >> 29) & 0x7FFFFFFFF
    x *= -4658895280553007687
    x ^= (x >> 32) & 0xFFFFFFFF
    if tokens is not None:
        for at, block in enumerate(block_lists(case)[0][0]):
            x[:, block, :, max(0, tokens - at * TOKENS):] = 0
    return x


def _sizes(side):
    """Slices, regions of a layer, parts of a region, heads and tokens of a slice, words."""
    parts, _, words = model(side.case)
    heads, packed = len(heads_of(side.case, side.rank)), 1 if side.case["split"] else parts
    if heads == 1 and side.slices > 1:  # no head to cut: the tokens are
        return side.slices, parts // packed, packed, 1, TOKENS // side.slices, words
    return side.slices, parts // packed, packed, heads // side.slices, TOKENS, words


def local_shape(side):
    slices, regions, packed, heads, tokens, words = _sizes(side)
    return slices, regions, blocks(side.case), packed, heads, tokens, words


def local(side, logical):
    """The order of the emulated device: slices; in each its regions, blocks, K and V, heads."""
    slices, regions, packed, heads, tokens, words = _sizes(side)
    many = blocks(side.case)
    if tokens < TOKENS:
        view = logical.view(regions, packed, many, heads, slices, tokens, words)
        return view.permute(4, 0, 2, 1, 3, 5, 6)
    view = logical.view(regions, packed, many, slices, heads, tokens, words)
    return view.permute(3, 0, 2, 1, 4, 5, 6)


def granules(case):
    """(place in the window group's list, granule) of what a window's transfer carries."""
    width, total = case["window"], case["tokens"]
    newest, oldest = (total - 1) // width, max(0, total - width) // width
    each = TOKENS // width
    # The list has two blocks, and ends with that of the newest token.
    return [(1 - (newest // each - granule // each), granule % each)
            for granule in range(oldest, newest + 1)]


def expected(side, at, life):
    """A consumer's cache after its requests, where all that was not asked for stays 0."""
    import torch

    case = side.case
    source = side.pattern(at, life, case["tokens"] if case["stream"] else None)
    want = torch.zeros(local_shape(side), dtype=torch.int64)
    for request in range(case["requests"]):
        fill(case, want, source, *block_lists(case, side.rank.consumer, request))
    return want


def fill(case, want, source, theirs, ours):
    """Puts what a request brings into `want`."""
    import torch

    want[:, :, ours[0]] = source[:, :, theirs[0]]
    if case["extra"].get("chunk_mode"):
        step, tail = case["step"], case["tokens"] - (count(case) - 1) * TOKENS
        want[:, :, ours[0][-1], :, :, -(-tail // step) * step:] = 0
    if not case["window"]:
        return
    if not case["extra"].get("swa_window_mode"):
        want[:, :, ours[1]] = source[:, :, theirs[1]]
        return
    width, each = case["window"], TOKENS // case["window"]
    for place, granule in granules(case):
        to, of = want[:, :, ours[1][place]], source[:, :, theirs[1][place]]
        if case["kernel"] in (0, width):  # the kernel's blocks are windows: one run of bytes
            cut = (*to.shape[:2], each, -1)
            run = to.clone(memory_format=torch.contiguous_format).view(cut)
            run[:, :, granule] = of.reshape(cut)[:, :, granule]
            want[:, :, ours[1][place]] = run.view(to.shape)
        else:  # a range of tokens of each head
            rows = slice(granule * width, (granule + 1) * width)
            to[..., rows, :] = of[..., rows, :]


def compare(side, life):
    """Words that differ in the asked blocks, and words that changed elsewhere."""
    wrong = stray = 0
    lists = [block_lists(side.case, side.rank.consumer, request)[1]
             for request in range(side.case["requests"])]
    asked = [block for groups in lists for group in groups for block in group]
    for at in range(len(side.layers)):
        differ = (side.cache(at) != expected(side, at, life)).transpose(0, 2)
        inside = int(differ[asked].sum())
        wrong, stray = wrong + inside, stray + int(differ.sum()) - inside
    return {"wrong": wrong, "stray": stray}


def changed(side, tokens=None):
    """Words of a producer's cache that are no longer what it wrote."""
    return sum(int((side.cache(at) != side.pattern(at, side.rank.life, tokens)).sum())
               for at in range(len(side.layers)))
