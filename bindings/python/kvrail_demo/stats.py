"""What the engine inside the plugin tells: it writes the file named by KVRAIL_STATS."""

import json


def read(path):
    """The engine's last figures, or None when there are none (a backend that is not ours)."""
    try:
        with open(path, encoding="utf-8") as file:
            figures = json.load(file)
        figures["rails"], figures["transfers"], figures["transport"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return figures


def rails(figures, direction):
    """Per rail its name, bytes, share, work requests and claims in this direction."""
    field = "bytes_read" if direction == "pull" else "bytes_written"
    total = sum(rail[field] for rail in figures["rails"])
    return [
        {
            "name": rail["name"],
            "bytes": rail[field],
            "share": rail[field] / total if total else 0.0,
            "work_requests": rail["work_requests"],
            "claims": rail["claims"],
        }
        for rail in figures["rails"]
    ]
