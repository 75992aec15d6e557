"""ensure_rbln_backend: the parameters, and every reason that NIXL would swallow."""

import itertools
import logging

import pytest
from fakes import FakeAgent

from nixl_rbln import RblnError, _abi, ensure_rbln_backend
from nixl_rbln._cards import Card, card_of


def refused(*args, **kwargs):
    with pytest.raises(RblnError) as caught:
        ensure_rbln_backend(*args, **kwargs)
    return str(caught.value)


def test_creates_once_with_text_parameters(agent, caplog):
    caplog.set_level(logging.INFO, "nixl_rbln")
    ensure_rbln_backend(agent, 3, stripe_width=0, rbln_ctx_ptr=0x7FFF00001000)
    ensure_rbln_backend(agent, 3, stripe_width=0, rbln_ctx_ptr=0x7FFF00001000)
    ensure_rbln_backend(agent)
    assert agent.created == [("RBLN", {
        "device_id": "3", "listen_ip": "auto", "stripe_width": "0",
        "rbln_ctx_ptr": str(0x7FFF00001000)})]
    assert "1 rail(s) over local" in caplog.text and "device 3 is rbln3" in caplog.text


def test_defaults_for_host_bounce(agent):
    assert ensure_rbln_backend(agent, 0) is None
    assert agent.created == [("RBLN", {"device_id": "0", "listen_ip": "auto"})]


def test_environment_is_not_overruled(agent, monkeypatch, sysroot):
    monkeypatch.setenv("KVRAIL_LISTEN_IP", "127.0.0.1")
    monkeypatch.setenv("KVRAIL_NUMA_NODE", "7")
    ensure_rbln_backend(agent, 1)
    assert agent.created == [("RBLN", {"device_id": "1"})]


@pytest.mark.parametrize("backends", [(), ("RBLN",)])
def test_no_nic(monkeypatch, sysroot, backends):
    """Without KVRAIL_TRANSPORT no NIC is an error, also when `auto` made the backend already."""
    monkeypatch.delenv("KVRAIL_TRANSPORT")
    agent = FakeAgent(backends)
    said = refused(agent, 1)
    assert said.startswith("no usable data-plane RoCE NIC on numa=1\n"), said
    assert "there is no RDMA device" in said and agent.created == []
    assert "KVRAIL_TRANSPORT=local" in said and "uninstall nixl-rbln" in said
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "1,0")
    assert "on numa=0\n" in refused(agent, 1)
    monkeypatch.setenv("KVRAIL_NUMA_NODE", "5")
    assert "on numa=5\n" in refused(agent, 1)


@pytest.mark.parametrize("width", [2, 4096, -1])
@pytest.mark.parametrize("backends", [(), ("RBLN",)])
def test_stripe_width(width, backends):
    agent = FakeAgent(backends)
    said = refused(agent, stripe_width=width)
    assert f"`{width}`" in said and "allowed: 1 (one rail" in said and "or 0 (every" in said
    assert agent.created == []


@pytest.mark.parametrize("width", [True, 1.0, "1", b"1"])
def test_stripe_width_type(agent, width):
    said = refused(agent, stripe_width=width)
    assert f"stripe_width={width!r}" in said and "allowed is a whole number" in said


def test_stripe_width_of_the_environment(agent, monkeypatch):
    monkeypatch.setenv("KVRAIL_STRIPE_WIDTH", "9")
    assert "`9`" in refused(agent)


@pytest.mark.parametrize("device", [-1, True, 1.5, None, "0"])
def test_device_id(agent, device):
    said = refused(agent, device)
    assert f"device_id={device!r}" in said and "allowed is" in said


def test_unknown_device(agent, monkeypatch, sysroot):
    assert "unknown device 2: cards here: rbln0, rbln1" in refused(agent, 2)
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "1")
    said = refused(agent, 1)
    assert "unknown device 1: RBLN_VISIBLE_DEVICES=1 shows 1 card(s)" in said
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "1,x")
    assert "`x` is not the number of a card" in refused(agent, 1)
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "1,7")
    assert "names card 7; cards here: rbln0, rbln1" in refused(agent, 1)
    assert agent.created == []


def test_cards_of_a_container(monkeypatch, sysroot):
    """Sysfs shows every card, /dev those that are ours; entries count those, or are numbers."""
    (sysroot / "dev").mkdir()
    (sysroot / "dev/rbln1").touch()
    assert card_of(0) == Card("rbln1", 1)
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "0")
    assert card_of(0) == Card("rbln1", 1)
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "1")
    assert card_of(0) == Card("rbln1", 1)
    monkeypatch.delenv("RBLN_VISIBLE_DEVICES")
    with pytest.raises(RblnError, match="unknown device 1: cards here: rbln1$"):
        card_of(1)


def test_host_without_cards(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRAIL_SYSROOT", str(tmp_path))
    assert card_of(5) == Card("rbln5", None)
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", "3 4")
    assert card_of(1) == Card("rbln4", None)
    with pytest.raises(RblnError, match="unknown device 2: RBLN_VISIBLE_DEVICES=3 4 shows 2 card"):
        card_of(2)


def test_the_engine_takes_the_same_card(monkeypatch, tmp_path, plugin_dir):
    """The rule stands twice: src/host/card.rs has it for an engine that is told a device only.
    Where this package refuses, the engine takes what it finds."""
    monkeypatch.setenv("KVRAIL_SYSROOT", str(tmp_path))
    (tmp_path / "dev").mkdir()
    for node, number in enumerate((2, 7, 10)):
        device = tmp_path / f"sys/class/rebellions/rbln{number}/device"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    abi = _abi.Abi(str(plugin_dir / _abi.PLUGIN))
    compared = set()
    for here in ((), (7,), (2, 10)):  # the cards of a container
        for number in here:
            (tmp_path / f"dev/rbln{number}").touch()
        for visible, each, device in itertools.product(
                ("", "0", "1,0", " 2 1 ", "10", "7,,10 2", "5", "x"), ("1", "2"), range(3)):
            monkeypatch.setenv("RBLN_VISIBLE_DEVICES", visible)
            monkeypatch.setenv("RBLN_NPUS_PER_DEVICE", each)
            try:
                card = card_of(device)
            except RblnError:
                continue
            with pytest.raises(RblnError) as caught:
                abi.probe({"device_id": str(device), "transport": "verbs"})
            first = str(caught.value).splitlines()[0]
            assert first.endswith(f" on numa={card.numa}"), (here, visible, each, device, card)
            compared.add((here, card.numa))
        for number in here:
            (tmp_path / f"dev/rbln{number}").unlink()
    assert len(compared) == 6


def test_node_of_the_card(monkeypatch, sysroot):
    def node(device_id):
        agent = FakeAgent()
        ensure_rbln_backend(agent, device_id)
        return agent.created[0][1].get("numa_node")

    assert [node(0), node(1)] == ["0", "1"]
    monkeypatch.setenv("RBLN_VISIBLE_DEVICES", " 1 , 0 ")
    assert [node(0), node(1)] == ["1", "0"]
    monkeypatch.setenv("RBLN_NPUS_PER_DEVICE", "2")
    assert node(0) == "1"
    monkeypatch.delenv("RBLN_VISIBLE_DEVICES")
    monkeypatch.setenv("RBLN_NPUS_PER_DEVICE", "0")
    assert "RBLN_NPUS_PER_DEVICE=0" in refused(FakeAgent(), 0)
    monkeypatch.delenv("RBLN_NPUS_PER_DEVICE")
    # A function without a node of its own takes that of what it hangs on; -1 says nothing.
    card = sysroot / "sys/devices/pci0/card1"
    inner = card / "function"
    inner.mkdir()
    (inner / "numa_node").write_text("-1\n")
    link = sysroot / "sys/class/rebellions/rbln1/device"
    link.unlink()
    link.symlink_to(inner)
    assert node(1) == "1"
    (card / "numa_node").write_text("-1\n")
    assert node(1) is None


def test_backend_made_by_somebody_else(caplog):
    """The agent's constructor made it, without parameters (`backends: ["RBLN"]`)."""
    agent = FakeAgent(["RBLN"])
    ensure_rbln_backend(agent, stripe_width=1)
    assert agent.created == [] and caplog.text == ""
    ensure_rbln_backend(agent, stripe_width=0)
    assert "stripe_width=0 has no effect" in caplog.text
    assert "set KVRAIL_STRIPE_WIDTH=0, or leave RBLN out" in caplog.text


@pytest.mark.parametrize("first", [0, None])
def test_another_width_than_the_first_call_asked_for(agent, caplog, monkeypatch, first):
    """The variable may have the wished value already: what helps is the first call's argument."""
    monkeypatch.setenv("KVRAIL_STRIPE_WIDTH", "1" if first == 0 else "0")
    ensure_rbln_backend(agent, stripe_width=first)
    ensure_rbln_backend(agent, stripe_width=0)
    assert caplog.text == ""
    ensure_rbln_backend(agent, stripe_width=1)
    assert "with stripe_width=0, so stripe_width=1 has no effect" in caplog.text
    assert "the first call for an agent decides: pass stripe_width=1 there" in caplog.text
    assert "KVRAIL_STRIPE_WIDTH" not in caplog.text
    other = FakeAgent()
    caplog.clear()
    ensure_rbln_backend(other, stripe_width=1)  # as advised
    ensure_rbln_backend(other, stripe_width=1)
    assert other.created[0][1]["stripe_width"] == "1" and caplog.text == ""


def test_parameters_that_somebody_else_passed(agent, caplog, monkeypatch, sysroot):
    """They beat the environment, so no variable is advised."""
    monkeypatch.setenv("KVRAIL_STRIPE_WIDTH", "0")
    agent.create_backend("RBLN", {"stripe_width": "1", "numa_node": "0"})
    ensure_rbln_backend(agent, 1, stripe_width=0)
    assert "pass stripe_width=0 where the backend is made" in caplog.text
    assert "pass numa_node=1 where the backend is made" in caplog.text
    assert "KVRAIL_" not in caplog.text


def test_another_node_than_the_backend_has(caplog, sysroot):
    """The NICs are chosen once: a device of another node is told."""
    for agent, advice in ((FakeAgent(["RBLN"]), "leave RBLN out"), (FakeAgent(), "before it, or")):
        ensure_rbln_backend(agent, 0)
        assert caplog.text == ""
        ensure_rbln_backend(agent, 1)
        assert "NUMA node 0 (device 0)" in caplog.text and "device 1 sits on node 1" in caplog.text
        assert "set KVRAIL_NUMA_NODE=1" in caplog.text and advice in caplog.text
        caplog.clear()


@pytest.mark.parametrize("agent, named", [(None, "NoneType"), (7, "int")])
def test_no_agent(agent, named):
    assert f"agent is a {named}" in refused(agent)


def test_listen_ip(agent):
    assert "listen_ip=None" in refused(agent, listen_ip=None)


def test_no_plugin():
    said = refused(FakeAgent(plugins=["UCX", "POSIX"]))
    assert "no plugin RBLN, only UCX, POSIX" in said and "nixl-rbln" in said


def test_refusal_of_nixl(agent):
    agent.fail = ValueError("NIXL_ERR_BACKEND")
    said = refused(agent, 4)
    assert "NIXL_ERR_BACKEND" in said and "'device_id': '4'" in said
    # The plugin was never called, so an older failure of its must not be shown as the reason.
    assert "see standard error" in said


def test_no_library(agent, monkeypatch, tmp_path):
    import nixl_rbln._abi as abi

    monkeypatch.setattr(abi, "_mapped", lambda: iter(()))
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    said = refused(agent)
    assert "libplugin_RBLN.so" in said and str(tmp_path) in said
    (tmp_path / "libplugin_RBLN.so").write_bytes(b"not a library")
    assert "is no plugin of this package" in refused(agent)
