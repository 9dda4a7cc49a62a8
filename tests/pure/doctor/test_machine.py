"""Checks of the machine, on facts made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.doctor import gpus, host, training
from lightning_hetero.doctor.facts import DeviceFacts, Facts, Package
from lightning_hetero.doctor.finding import failing, findings_text, warning, worst
from tests.pure.doctor.kit import changed, made_up

pytestmark = pytest.mark.pure
GIB = 2.0**30


def gpu(name: str, major: int, minor: int, *, free: float = 10.0) -> DeviceFacts:
    return DeviceFacts(name=name, capability=(major, minor), mem_bytes=10 * GIB, free_bytes=free * GIB)


BOX = made_up(
    devices=(gpu("RTX 4090", 8, 9), gpu("RTX 3080", 8, 6), gpu("RTX 2080", 7, 5)),
    links_by="nccl",
    cuda="12.8",
    arch_list=("sm_75", "sm_80", "sm_86", "sm_90"),
    cores=16,
    shm_bytes=64 * GIB,
    shm_free_bytes=60 * GIB,
    backends=("gloo", "nccl"),
    environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    cluster=cluster_from_plain(
        {"devices": [{"speed": v} for v in (1.0, 0.5, 0.25)], "link": {"bandwidth": "12 GB/s"}}
    ),
)


def levels(check: Any, facts: Facts) -> list[str]:
    return [finding.level for finding in check(facts)]


@pytest.mark.parametrize("check", training.CHECKS, ids=lambda check: check.__name__)
def test_a_good_machine_has_no_complaint(check: Any) -> None:
    assert set(levels(check, BOX)) <= {"ok"}


def test_packages() -> None:
    torch = Package(name="torch", installed="2.4.0", wanted=">=2.5", fits=False)
    gone = Package(name="numpy", installed=None, wanted="", fits=False)
    (low, missing) = host.versions(changed(BOX, packages=(torch, gone)))
    assert (low.level, low.text, low.advice) == ("fail", "torch 2.4.0, needed is >=2.5", "pip install 'torch>=2.5'")
    assert missing.level == "fail" and "numpy not installed, needed is any version" in missing.text
    good = Package(name="torch", installed="2.13", wanted=">=2.5", fits=True)
    (found,) = host.versions(changed(BOX, packages=(good,)))
    assert (found.level, found.text) == ("ok", "torch 2.13")


def test_the_order_of_unequal_devices_is_said_where_it_is_not_the_buses() -> None:
    (found,) = gpus.device_order(changed(BOX, environ={}))
    assert (
        found.level == "warn" and "rank 0: RTX 4090, rank 1: RTX 3080" in found.text and "PCI_BUS_ID" in found.advice
    )
    alike = changed(BOX, devices=(gpu("RTX 3080", 8, 6),) * 2, environ={})
    assert levels(gpus.device_order, alike) == ["ok"]
    assert "processes on 16 cores" in gpus.device_order(changed(BOX, devices=()))[0].text
    twice = changed(BOX, environ={"CUDA_VISIBLE_DEVICES": "0,1,0"})
    assert "names 0 twice" in gpus.same_names(twice)[0].text and levels(gpus.same_names, twice) == ["fail"]
    crowd = changed(BOX, environ={"LOCAL_WORLD_SIZE": "4"})
    (found,) = gpus.same_names(crowd)
    assert found.level == "warn" and "of 4 ranks on this node this one sees 3 GPUs" in found.text
    assert "gloo" in found.advice and gpus.same_names(changed(crowd, devices=())) == []


def test_cards_that_do_not_do_all_are_named() -> None:
    old = replace(gpu("RTX 2080", 7, 5), computes_bfloat16=False)
    (found,) = gpus.bfloat16(changed(BOX, devices=(*BOX.gpus.devices[:2], old)))
    assert found.level == "warn" and found.text.startswith("rank 2 (RTX 2080): bfloat16 is emulated")
    assert "'16-mixed'" in found.advice
    (found,) = gpus.instances(changed(BOX, devices=(gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9, 0),) * 2))
    assert found.level == "warn" and "rank 1 (NVIDIA H100 80GB HBM3 MIG 1g.10gb)" in found.text
    other = replace(gpu("Arc", 0, 0), capability=None)
    assert gpus.architectures(changed(BOX, cuda=None, devices=(other,))) == []


def test_what_the_driver_does_not_tell() -> None:
    (found,) = gpus.device_order(changed(BOX, devices=(), devices_problem="no driver"))
    assert found.level == "fail" and "no driver" in found.text
    unknown = changed(BOX, devices=(replace(BOX.gpus.devices[0], free_bytes=None), BOX.gpus.devices[1]))
    assert gpus.memory(unknown)[0].text == "free by rank: not known, 10 GiB"


@pytest.mark.parametrize(
    ("arch_list", "level", "words"),
    [
        (("sm_75", "sm_80", "sm_86"), "ok", "has code for sm_75, sm_86, sm_89"),  # 8.6 runs on 8.9
        (("sm_80", "sm_86", "sm_90"), "fail", "RTX 2080, sm_75): the wheel for CUDA 12.8 has no code for it"),
        (("sm_75", "sm_80", "compute_80"), "ok", ""),
        (("sm_86", "sm_89", "compute_70"), "warn", "RTX 2080, sm_75): the wheel has only PTX for it"),
        (("sm_75", "sm_86a"), "ok", ""),
        ((), "fail", "(none)"),
    ],
)
def test_architectures(arch_list: tuple[str, ...], level: str, words: str) -> None:
    found = gpus.architectures(changed(BOX, arch_list=arch_list))
    assert worst(found) == level and any(words in finding.text for finding in found)


def test_an_old_card_is_told_of_an_older_wheel_and_a_new_one_of_a_newer() -> None:
    old = changed(BOX, devices=(gpu("GTX 1070", 6, 1),))
    new = changed(BOX, devices=(gpu("B200", 10, 0),))
    assert "an older wheel" in gpus.architectures(old)[0].advice
    assert "a newer wheel" in gpus.architectures(new)[0].advice
    assert "one for CPUs" in gpus.architectures(changed(BOX, cuda=None))[0].text
    assert gpus.architectures(changed(BOX, devices=())) == []


def test_shared_memory_is_wanted_for_the_slots_of_all_ranks() -> None:
    docker = changed(BOX, shm_bytes=2.0**26, shm_free_bytes=2.0**26)
    (found,) = host.shared_memory(docker)
    assert found.level == "warn" and "64 MiB of 64 MiB free" in found.text and "--shm-size=1g" in found.advice
    large = changed(BOX, param_bytes=8 * GIB)
    assert "want 72 GiB" in host.shared_memory(large)[0].text
    assert levels(host.shared_memory, changed(BOX, param_bytes=4 * GIB)) == ["ok"]
    assert "there is no /dev/shm" in host.shared_memory(changed(BOX, shm_bytes=None))[0].text


def test_fork_backends_and_cores() -> None:
    assert levels(host.fork, changed(BOX, start_methods=("spawn",))) == ["warn"]
    assert levels(host.backends, changed(BOX, backends=("nccl",))) == ["fail"]
    assert levels(host.backends, changed(BOX, backends=("gloo",))) == ["warn"]
    assert levels(host.backends, changed(BOX, backends=("gloo",), devices=())) == ["ok"]
    assert levels(host.cores, changed(BOX, cores=2)) == ["warn"]
    assert levels(host.cores, changed(BOX, cores=2, devices_wanted=2)) == ["ok"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"addresses": {"node0": False}}, "MASTER_ADDR=node0 cannot be resolved"),
        ({"free_ports": {"29500": False}}, "MASTER_PORT=29500 is in use"),
        (
            {"environ": {"GLOO_SOCKET_IFNAME": "ib0"}, "interfaces": ("lo", "eth0")},
            "names ib0, which this machine has not",
        ),
        ({"environ": {"WORLD_SIZE": "4"}}, "WORLD_SIZE=4 and no MASTER_ADDR"),
    ],
)
def test_ranks_that_would_not_meet(facts: dict[str, Any], words: str) -> None:
    (found,) = host.rendezvous(changed(BOX, **facts))
    assert found.level == "fail" and words in found.text and found.advice


def test_ranks_that_will_meet() -> None:
    fine = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^docker", "TORCHELASTIC_RUN_ID": "a"}
    (found,) = host.rendezvous(changed(BOX, environ=fine, interfaces=("eth0",), addresses={"localhost": True}))
    assert found.level == "ok" and "torchrun" in found.text


def test_speeds_memory_and_links() -> None:
    (found,) = training.speeds(BOX)
    assert "stock DDP waits for 42 % of the device-seconds" in found.text and "lightning-hetero-plan" in found.advice
    assert training.speeds(changed(BOX, cluster=None, probe_problem="no"))[0].text == "no"
    taken = changed(BOX, devices=(gpu("RTX 4090", 8, 9, free=4.0),))
    (held,) = gpus.memory(taken)
    assert held.level == "warn" and "6 GiB of 10 GiB are taken" in held.text
    spec = {
        "devices": [{"count": 3}],
        "link": {"bandwidth": "12 GB/s"},
        "links": [{"between": [0, 2], "bandwidth": "1 GB/s"}],
    }
    (slow,) = training.links(changed(BOX, cluster=cluster_from_plain(spec)))
    assert slow.level == "warn" and "from rank 0" in slow.text and "1 GB/s to 12 GB/s" in slow.text
    assert training.links(changed(BOX, cluster=cluster_from_plain({"devices": [{}]}))) == []


def test_the_gravest_level_counts_and_every_complaint_says_what_to_do() -> None:
    assert worst([]) == "ok"
    found = [warning("a", "t", "do"), failing("b", "u", "")]
    assert worst(found) == "fail" and findings_text(found) == "warn  a: t\n      -> do\nfail  b: u"
    bad = made_up(devices=(gpu("old", 3, 0, free=1.0), gpu("new", 9, 0)), environ={"WORLD_SIZE": "2"}, start_methods=())
    for check in training.CHECKS:
        assert all(finding.advice for finding in check(bad) if finding.level != "ok"), check.__name__
