"""The one exception that this package raises, and the logger that it writes to."""

from __future__ import annotations

import logging

log = logging.getLogger("nixl_rbln")


class RblnError(RuntimeError):
    """What was wrong, the value seen, the value allowed, and what to do."""
