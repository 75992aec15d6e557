"""Makes NIXL's backend RBLN on an agent, after the checks whose reasons NIXL would swallow."""

from __future__ import annotations

import os
import time
from typing import Any, Optional

from . import _abi, _cards
from ._errors import RblnError, log

BACKEND = "RBLN"
_ASKED = "_nixl_rbln_asked"  # on the agent: the parameters that were found good
_MADE = "_nixl_rbln_made"  # on the agent: the parameters that this module made the backend with
_NO_NIC = (
    "\n  without such a NIC: KVRAIL_TRANSPORT=local, for processes of one host; or uninstall "
    "nixl-rbln, and a host bounce goes over UCX"
)


def whole(name: str, value: Any, least: int = 0) -> int:
    """`value` as a plain int: also from numpy, never from a bool, a float or a string."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value.__index__())
    except (AttributeError, TypeError):
        raise RblnError(
            f"{name}={value!r} is a {type(value).__name__}: allowed is a whole number"
        ) from None
    if number < least:
        raise RblnError(f"{name}={number}: allowed is {least} or more")
    return number


def _parameters(
    device_id: int, stripe_width: Optional[int], rbln_ctx_ptr: Optional[int], listen_ip: str
) -> dict[str, str]:
    params = {"device_id": str(device_id)}
    # What the user set in the environment stays: create_backend would win over it.
    if not os.environ.get("KVRAIL_LISTEN_IP"):
        params["listen_ip"] = listen_ip
    # `auto` falls back to processes of this host, which no peer on another host would notice
    # before its first request. A user who wants that says KVRAIL_TRANSPORT=local.
    if not os.environ.get("KVRAIL_TRANSPORT"):
        params["transport"] = "verbs"
    if stripe_width is not None:
        params["stripe_width"] = str(stripe_width)
    if rbln_ctx_ptr is not None:
        params["rbln_ctx_ptr"] = str(rbln_ctx_ptr)
    return params


def _known_to_nixl(agent: Any) -> None:
    known = getattr(agent, "plugin_list", None)
    if known is not None and BACKEND not in known:
        nixl = type(agent).__module__.partition(".")[0]
        raise RblnError(
            f"{nixl} finds no plugin {BACKEND}, only {', '.join(known) or 'none'}; install the "
            f"wheel nixl-rbln beside it (into .{nixl}.mesonpy.libs/plugins), or let "
            f"NIXL_PLUGIN_DIR name a folder with {_abi.PLUGIN}"
        )


def _compare(agent: Any, params: dict[str, str]) -> None:
    """The backend is there already: say what of the wishes it does not fulfil, and what would."""
    made = getattr(agent, _MADE, None)
    options = getattr(agent, "backend_options", {}).get(BACKEND, {}) if made is None else made

    def has(key: str, default: str) -> str:
        return options.get(key) or os.environ.get(f"KVRAIL_{key.upper()}") or default

    def elsewhere(key: str, value: str) -> str:
        """Advice for a backend that this module did not make. What was passed beats what is set."""
        if options.get(key):
            return f"pass {key}={value} where the backend is made"
        return (f"set KVRAIL_{key.upper()}={value}, or leave RBLN out of the connector's "
                "`backends`")

    wish = params.get("stripe_width")
    now = has("stripe_width", "1")
    if wish is not None and wish != now:
        log.warning(
            "backend RBLN exists already with stripe_width=%s, so stripe_width=%s has no effect; "
            "%s", now, wish, elsewhere("stripe_width", wish) if made is None else
            f"the first call for an agent decides: pass stripe_width={wish} there")
    numa, device = params.get("numa_node"), has("device_id", "0")
    node = has("numa_node", "")
    if not node and device.isdecimal():
        of_card = _cards.card_of(int(device)).numa
        node = "" if of_card is None else str(of_card)
    if numa is not None and node and node != numa:
        log.warning(
            "backend RBLN exists already, with the NICs of NUMA node %s (device %s), and device "
            "%s sits on node %s; %s",
            node, device, params["device_id"], numa,
            elsewhere("numa_node", numa) if made is None else
            f"the first call for an agent decides: set KVRAIL_NUMA_NODE={numa} before it, or make "
            f"it for a device of node {numa}")


def _probed(abi: _abi.Abi, params: dict[str, str]) -> _abi.Probe:
    try:
        return abi.probe(params)
    except RblnError as error:
        # Who set the transport knows of it.
        if "transport" in params and str(error).startswith("no usable data-plane RoCE NIC"):
            raise RblnError(f"{error}{_NO_NIC}") from error
        raise


def ensure_rbln_backend(
    agent: Any,
    device_id: int = 0,
    *,
    stripe_width: Optional[int] = None,
    rbln_ctx_ptr: Optional[int] = None,
    listen_ip: str = "auto",
) -> None:
    """Makes backend RBLN on `agent` (a nixl_agent), unless it has it.

    device_id: torch device whose card's NUMA node the NICs must share; KVRAIL_NUMA_NODE overrides.
    stripe_width: 1 (default) one rail a transfer, 0 every rail that both sides share.
    rbln_ctx_ptr: context of the device's runtime; not needed for host memory.
    listen_ip: IPv4 address of the bootstrap listener, or auto.

    Raises RblnError: a bad value; a device that is none of this host's cards or that
    RBLN_VISIBLE_DEVICES does not list (a host without cards and without that variable takes every
    number); no NIC (`no usable data-plane RoCE NIC on numa=N` and a line for each port); no plugin;
    NIXL's refusal.
    """
    if not hasattr(agent, "backends") or not hasattr(agent, "create_backend"):
        raise RblnError(f"agent is a {type(agent).__name__}: allowed is a nixl_agent")
    if not isinstance(listen_ip, str):
        raise RblnError(f"listen_ip={listen_ip!r}: allowed is an IPv4 address, or 'auto'")
    device_id = whole("device_id", device_id)
    if stripe_width is not None:
        stripe_width = whole("stripe_width", stripe_width, -(1 << 63))
    if rbln_ctx_ptr is not None:
        rbln_ctx_ptr = whole("rbln_ctx_ptr", rbln_ctx_ptr)
    card = _cards.card_of(device_id)
    params = _parameters(device_id, stripe_width, rbln_ctx_ptr, listen_ip)
    if card.numa is not None and not os.environ.get("KVRAIL_NUMA_NODE"):
        params["numa_node"] = str(card.numa)

    if BACKEND in agent.backends and getattr(agent, _ASKED, None) == params:
        return
    _known_to_nixl(agent)
    started = time.perf_counter()
    abi = _abi.load(agent)
    found = _probed(abi, params)
    setattr(agent, _ASKED, params)
    if BACKEND in agent.backends:
        _compare(agent, params)
        return
    abi.forget()
    try:
        agent.create_backend(BACKEND, params)
    except Exception as error:
        raise RblnError(
            f"NIXL could not make backend {BACKEND} with {params}: {error}; "
            f"the plugin's words: {abi.last_error() or 'see standard error'}"
        ) from error
    setattr(agent, _MADE, params)
    node = params.get("numa_node") or os.environ.get("KVRAIL_NUMA_NODE") or "unknown"
    log.info(
        "backend RBLN: %d rail(s) over %s: %s; device %d is %s, numa %s, stripe_width %s, %.0f ms",
        len(found.rails), found.transport, ", ".join(found.rails), device_id, card.name, node,
        stripe_width if stripe_width is not None else "default",
        1e3 * (time.perf_counter() - started),
    )
