"""Which card a torch device is, and the NUMA node that the card sits on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ._errors import RblnError

_CLASS = "sys/class/rebellions"


@dataclass(frozen=True)
class Card:
    """`numa` is None where the kernel does not say, as on a host without cards."""

    name: str
    numa: Optional[int]


def _whole(name: str, least: int, fallback: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return fallback
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise RblnError(f"{name}={text}: allowed is a whole number from {least} on")
    return int(text)


def _numbers(folder: Path) -> list[int]:
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(n[4:]) for n in names if n.startswith("rbln") and n[4:].isdecimal())


def _number(device_id: int, present: list[int]) -> int:
    """The card of a device, as vllm-rbln reads it: entry i of RBLN_VISIBLE_DEVICES is device i and
    names the entry-th of the cards that are present, or else a card by its number. Of a device of
    several cards (RBLN_NPUS_PER_DEVICE) the first one counts."""
    at = device_id * _whole("RBLN_NPUS_PER_DEVICE", 1, 1)
    here = ", ".join(f"rbln{number}" for number in present)
    visible = os.environ.get("RBLN_VISIBLE_DEVICES", "").strip()
    if not visible:
        if at < len(present) or not present:
            return present[at] if present else at
        raise RblnError(f"unknown device {device_id}: cards here: {here}")
    entries = visible.replace(",", " ").split()
    if at >= len(entries):
        raise RblnError(
            f"unknown device {device_id}: RBLN_VISIBLE_DEVICES={visible} shows {len(entries)} "
            f"card(s), and this device would be at place {at}, counted from 0"
        )
    entry = entries[at]
    if not entry.isascii() or not entry.isdigit():
        raise RblnError(
            f"RBLN_VISIBLE_DEVICES={visible}: `{entry}` is not the number of a card; "
            "allowed are numbers with commas, such as 0,1"
        )
    if int(entry) < len(present):
        return present[int(entry)]
    if present and int(entry) not in present:
        raise RblnError(
            f"unknown device {device_id}: RBLN_VISIBLE_DEVICES={visible} names card {entry}; "
            f"cards here: {here}"
        )
    return int(entry)


def _numa(device: Path) -> Optional[int]:
    """That of the device, or of the nearest ancestor that knows (a function on another bus)."""
    try:
        folder = device.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    for place in (folder, *folder.parents):
        try:
            node = int((place / "numa_node").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if node >= 0:
            return node
    return None


def card_of(device_id: int) -> Card:
    """The card of torch device `device_id`. Without any card on this host its node is unknown."""
    root = Path(os.environ.get("KVRAIL_SYSROOT") or "/")
    # Sysfs lists every card of the host, /dev those of this container.
    known = _numbers(root / _CLASS)
    name = f"rbln{_number(device_id, _numbers(root / 'dev') or known)}"
    return Card(name, _numa(root / _CLASS / name / "device") if known else None)
