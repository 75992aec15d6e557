"""What the connector hands over, without NIXL, torch and a device."""

from types import SimpleNamespace

TWINS = 4  # of the fake NICs fakeN and fake(N + TWINS) are in one subnet, as of two hosts


class FakeTensor:
    """An entry of `nbytes` bytes of 2-byte elements; its key is whatever number it is given."""

    def __init__(self, key, nbytes, contiguous=True, device=0, kind="cpu"):
        self.key, self.nbytes, self.contiguous, self.on = key, nbytes, contiguous, device
        self.device = SimpleNamespace(type=kind)
        self.shape = (nbytes // 2,)

    def is_contiguous(self):
        return self.contiguous

    def stride(self):
        return (1,) if self.contiguous else (2,)

    def data_ptr(self):
        return self.key

    def numel(self):
        return self.nbytes // 2

    def element_size(self):
        return 2

    def get_device(self):
        return self.on


class FakeAgent:
    """Records what is asked of it, under the names of nixl_cu12's agent."""

    name = "fake"

    def __init__(self, backends=(), plugins=("UCX", "RBLN")):
        self.backends = {name: object() for name in backends}
        self.backend_options = {}
        self.plugin_list = list(plugins)
        self.created, self.registered, self.deregistered = [], [], []
        self.fail = None

    def create_backend(self, name, params):
        if self.fail:
            raise self.fail
        assert name not in self.backends, "NIXL refuses a second one"
        assert all(type(x) is str for pair in params.items() for x in pair)
        self.created.append((name, dict(params)))
        self.backends[name] = object()
        self.backend_options[name] = dict(params)

    def get_reg_descs(self, descs, mem):
        assert all(type(x) is int for desc in descs for x in desc[:3])
        return SimpleNamespace(descs=list(descs), mem=mem)

    def register_memory(self, listed, backends):
        if self.fail:
            raise self.fail
        self.registered.append((listed, backends))
        return listed

    def deregister_memory(self, listed, backends=()):
        if self.fail:
            raise self.fail
        self.deregistered.append(listed)
