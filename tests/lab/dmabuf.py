"""A NIXL side whose memory is a part of a dma-buf, registered as VRAM by its metaInfo."""

import fcntl
import mmap
import os
import struct

import numpy as np
from rig import Side

# Requests of linux/udmabuf.h and linux/dma-heap.h.
UDMABUF_CREATE = 0x40187542
DMA_HEAP_IOCTL_ALLOC = 0xC0184800
# The part begins here in the buffer and has pages behind it. Its address in descriptors is neither
# that of the mapping nor an offset, but lies in a page as the offset does.
BEFORE, AFTER, EDGE = 0x3040, 0x5000, 0xA5
BASE = 0x600000000000 + BEFORE % 0x1000


def udmabuf(nbytes):
    """Descriptor of a dma-buf of a file's pages."""
    file = os.memfd_create("udmabuf", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    device = os.open("/dev/udmabuf", os.O_RDWR)
    # The result is the descriptor; Python gives it only for an array.
    ask = bytearray(struct.pack("IIQQ", file, 1, 0, nbytes))
    made = fcntl.ioctl(device, UDMABUF_CREATE, ask)
    os.close(device)
    os.close(file)
    return made


def heap(nbytes):
    """Descriptor of a dma-buf of the kernel's own pages."""
    device = os.open("/dev/dma_heap/system", os.O_RDWR)
    ask = struct.pack("QIIQ", nbytes, 0, os.O_RDWR | os.O_CLOEXEC, 0)
    made = struct.unpack("QIIQ", fcntl.ioctl(device, DMA_HEAP_IOCTL_ALLOC, ask))[1]
    os.close(device)
    return made


class _Part(Side):
    """The descriptor is closed as soon as the memory is registered."""

    kind = "VRAM"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.close(self.fd)

    def buffer(self, nbytes):
        whole = -(-(BEFORE + nbytes + AFTER) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = self.make(whole)
        self.meta = f"kvrail:mem=dmabuf;fd={self.fd};offset={BEFORE}"
        self.whole = np.frombuffer(mmap.mmap(self.fd, whole), np.uint8)
        self.whole[:] = EDGE
        return self.whole[BEFORE:BEFORE + nbytes], BASE

    def edges(self):
        """Fails when bytes around the part were touched."""
        for edge in self.whole[:BEFORE], self.whole[BEFORE + self.mem.size:]:
            touched = np.flatnonzero(edge != EDGE)
            assert edge.size and not touched.size, f"{touched.size} bytes around the part changed"


class UdmabufSide(_Part):
    make = staticmethod(udmabuf)


class HeapSide(_Part):
    make = staticmethod(heap)
