"""The C ABI of the plugin that NIXL itself loads, through ctypes.

NIXL turns every refusal of a backend into one status. So what decides is asked here first, of the
same file and by the same calls: kvr_config_env, kvr_config_set, kvr_engine_create.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping

from ._errors import RblnError

PLUGIN = "libplugin_RBLN.so"
ABI_MAJOR = 0
_CONFIG_BYTES = 4096  # the most that kvr_config_init takes; the library knows less of it
_TRANSPORT_LEN = 16
_RAIL_NAME_LEN = 32


class _EngineInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rails", ctypes.c_uint32),
        ("fixed_bytes", ctypes.c_uint64),
        ("pool_bytes", ctypes.c_uint64),
        ("pool_limit", ctypes.c_uint64),
        ("peers", ctypes.c_uint32),
        ("regions", ctypes.c_uint32),
        ("remote_regions", ctypes.c_uint32),
        ("tables", ctypes.c_uint32),
        ("transfers", ctypes.c_uint32),
        ("transport", ctypes.c_char * _TRANSPORT_LEN),
    ]


class _RailInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("name", ctypes.c_char * _RAIL_NAME_LEN),
    ]


@dataclass(frozen=True)
class Probe:
    """What an engine of these parameters would use."""

    transport: str
    rails: tuple[str, ...]


class Abi:
    """The functions of one plugin file. Its texts are those of the calling thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._nothing = ""
        try:
            self._lib = ctypes.CDLL(path)
            self._lib.kvr_last_error.restype = ctypes.c_size_t
            found = self._lib.kvr_abi_version() >> 16
        except (OSError, AttributeError) as error:
            raise RblnError(
                f"{path} is no plugin of this package: {error}; "
                "install the wheel nixl-rbln again, or point NIXL_PLUGIN_DIR at its plugin"
            ) from error
        if found != ABI_MAJOR:
            raise RblnError(
                f"{path} has ABI version {found}, this package needs {ABI_MAJOR}: "
                "plugin and package must come from one wheel"
            )

    def _text(self) -> str:
        text = ctypes.create_string_buffer(8192)
        self._lib.kvr_last_error(text, ctypes.c_size_t(len(text)))
        return text.value.decode("utf-8", "replace")

    def forget(self) -> None:
        """Puts the text of a call without meaning in the place of this thread's last error."""
        self._lib.kvr_config_init(None, ctypes.c_size_t(0))
        self._nothing = self._text()

    def last_error(self) -> str:
        """The text of this thread's last failed call, without the function's name in front.
        Empty when no call failed since `forget`."""
        words = self._text()
        if words == self._nothing:
            return ""
        name, colon, rest = words.partition(": ")
        return rest if colon and name.startswith("kvr_") else words

    def _check(self, status: int) -> None:
        if status < 0:
            raise RblnError(self.last_error())

    def config(self, params: Mapping[str, str]) -> Any:
        """A kvr_config: defaults, then the environment, then `params`, as the plugin makes it."""
        config = (ctypes.c_uint64 * (_CONFIG_BYTES // 8))()
        self._check(self._lib.kvr_config_init(config, ctypes.c_size_t(_CONFIG_BYTES)))
        self._check(self._lib.kvr_config_env(config))
        for key, value in params.items():
            self._check(self._lib.kvr_config_set(config, key.encode(), value.encode()))
        return config

    def probe(self, params: Mapping[str, str]) -> Probe:
        """Makes an engine as the plugin would and ends it. Raises the plugin's own reason.

        On any port: that of the real engine may be taken, by the real engine.
        """
        config = self.config({**params, "port": "0", "progress_thread": "0"})
        engine = ctypes.c_void_p()
        self._check(self._lib.kvr_engine_create(config, ctypes.byref(engine)))
        try:
            info = _EngineInfo(struct_size=ctypes.sizeof(_EngineInfo))
            self._check(self._lib.kvr_engine_info_get(engine, ctypes.byref(info)))
            rails = []
            for index in range(info.rails):
                rail = _RailInfo(struct_size=ctypes.sizeof(_RailInfo))
                self._check(self._lib.kvr_rail_info_get(
                    engine, ctypes.c_uint32(index), ctypes.byref(rail)))
                rails.append(rail.name.decode("utf-8", "replace"))
            return Probe(info.transport.decode("utf-8", "replace"), tuple(rails))
        finally:
            self._check(self._lib.kvr_engine_destroy(engine))


def _mapped() -> Iterator[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].rstrip("\n").endswith("/" + PLUGIN):
                    yield fields[5].rstrip("\n")
    except OSError:
        return


def _beside_nixl() -> Iterator[str]:
    folder = os.environ.get("NIXL_PLUGIN_DIR")
    if folder:
        yield str(Path(folder) / PLUGIN)
    # This package lies in site-packages, as does NIXL's own folder of plugins.
    for found in sorted(Path(__file__).resolve().parents[1].glob(".nixl*.mesonpy.libs/plugins")):
        yield str(found / PLUGIN)


def load(agent: Any) -> Abi:
    """The plugin that `agent` uses. Asking NIXL for its parameters makes NIXL load it."""
    ask = getattr(agent, "get_plugin_params", None)
    if ask is not None:
        ask("RBLN")
    for path in _mapped():
        return Abi(path)
    looked = list(_beside_nixl())
    for path in looked:
        if Path(path).exists():
            return Abi(path)
    raise RblnError(
        f"NIXL has loaded no {PLUGIN}, and it is not in {', '.join(looked) or 'NIXL_PLUGIN_DIR'}; "
        "install the wheel nixl-rbln into the environment of nixl-cu12, or set NIXL_PLUGIN_DIR"
    )
