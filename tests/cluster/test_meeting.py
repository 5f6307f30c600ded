"""Ranks that find each other, and those that do not: who is missing is said within seconds."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from trainer.cluster import meeting
from trainer.cluster.interfaces import interface_variables
from trainer.cluster.meeting import meet, reach
from trainer.cluster.ranks import NODES
from trainer.errors import RankMissing
from trainer.ports import free_port

HERE = socket.gethostname()


def meet_in_threads(ranks: range, world_size: int, hosts: list[str], **silent: str) -> dict[int, str]:
    """The reason that each rank gives; "met" where it gives none."""
    store, said = HashStore(), {}

    def rank(number: int) -> None:
        try:
            meet(store, number, world_size, hosts, 0.6, silent.get)
            said[number] = "met"
        except RankMissing as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_ranks_that_are_all_there_meet() -> None:
    assert meet_in_threads(range(4), 4, [HERE]) == dict.fromkeys(range(4), "met")


def test_ranks_that_do_not_come_are_named_with_the_hosts_from_which_nobody_came() -> None:
    said = meet_in_threads(range(2), 4, [HERE, "node7"])
    assert said == {0: "ranks 2, 3 did not come within 1 s, and nobody from node7", 1: ""}


def test_a_host_that_gives_no_sign_of_life_is_named_before_patience_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_UNREACHABLE", 0.1)
    said = meet_in_threads(range(2), 4, [HERE, "node7", "node8"], node8="no route to host")
    assert said[0].startswith(
        f"node8 cannot be reached from {HERE}: no route to host; ranks 2, 3 did not come"
    )
    assert said[1] == ""


def test_a_host_without_an_address_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_UNREACHABLE", 0.1)
    with pytest.raises(RankMissing, match=r"cannot reach rank 0 on no-such-host.invalid, port 1: no address"):
        reach("no-such-host.invalid", 1, 60)


def test_a_host_that_refuses_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may still be starting."""
    monkeypatch.setattr(meeting, "_UNREACHABLE", 0.1)
    port = free_port()
    with pytest.raises(RankMissing, match="nobody listens there"):
        reach("127.0.0.1", port, 0.6)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        threading.Thread(target=lambda: (time.sleep(0.3), listener.listen()), daemon=True).start()
        reach("127.0.0.1", port, 30)


ON_TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", NODES: f"{HERE},192.0.2.7"}


def test_the_interface_is_named_on_several_hosts_only_and_what_is_set_stays() -> None:
    assert interface_variables({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, None) == {}
    assert interface_variables({"WORLD_SIZE": "4"}, None) == {}
    assert interface_variables(ON_TWO_HOSTS, "ib0") == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }
    assert interface_variables(ON_TWO_HOSTS | {"GLOO_SOCKET_IFNAME": "eth9"}, "ib0") == {
        "NCCL_SOCKET_IFNAME": "=ib0"
    }


def test_the_interface_is_the_one_of_the_route_to_another_host() -> None:
    named = interface_variables(ON_TWO_HOSTS, None).get("GLOO_SOCKET_IFNAME")
    names = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert named in {None, *names}  # None: without a route
