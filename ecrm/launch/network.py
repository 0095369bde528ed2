"""The network between ranks on several hosts.

A network has the head machine's address and a subnet; IPv4 only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ecrm.base.errors import UsageError
from ecrm.launch.hosts_file import Host

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


@dataclass(frozen=True)
class Network:
    """An interface of this machine: name, address, and subnet."""

    interface: str
    address: str
    subnet: ipaddress.IPv4Network


def local_networks() -> list[Network]:
    """This machine's interfaces with an IPv4 address, and the first address of each interface."""
    networks = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (
                    _ask(control, request, name) for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # no IPv4 address
                continue
            networks.append(
                Network(name, address, ipaddress.IPv4Network(f"{address}/{mask}", strict=False))
            )
    return networks


def _ask(control: socket.socket, request: int, interface: str) -> str:
    answer = fcntl.ioctl(control.fileno(), request, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def choose_network(
    wanted: str | None, hosts: Iterable[Host], networks: Sequence[Network]
) -> Network:
    """The network in `networks` with all hosts, or the network named by `wanted`.

    `wanted` is an interface, its subnet, or another subnet with a single address of `networks`.
    Raises UsageError if no network fits.
    """
    have = ", ".join(f"{network.interface} {network.subnet}" for network in networks) or "none"
    if wanted is not None:
        for network in networks:
            if wanted in (network.interface, str(network.subnet)):
                return network
        inside = _inside(wanted, networks)
        if len(inside) == 1:
            return inside[0]
        if inside:
            raise UsageError(
                f"--interface {wanted}: this subnet has several addresses of this machine, "
                f"{', '.join(f'{network.interface} {network.address}' for network in inside)}: "
                "type a smaller subnet, or an interface"
            )
        raise UsageError(
            f"--interface {wanted}: no such interface or subnet of this machine; it has {have}"
        )
    common: list[Network] = list(networks)
    for host in hosts:
        address = _address_of(host)
        common = [network for network in common if address in network.subnet]
        if not common:
            raise UsageError(
                f"host {host.name} ({address}) is not in one subnet with this machine and the "
                f"hosts before it; this machine has {have}: type --interface NAME, or the "
                "address in the right one behind the host's name"
            )
    return common[0]


def _inside(wanted: str, networks: Sequence[Network]) -> list[Network]:
    """The networks with an address in the subnet `wanted`, such as the subnet of all pods.

    The interface of a pod has the subnet of its node, or of a single address.
    """
    if "/" not in wanted:
        return []
    try:
        subnet = ipaddress.IPv4Network(wanted, strict=False)
    except ValueError:
        return []
    inside = [each for each in networks if ipaddress.IPv4Address(each.address) in subnet]
    return [replace(each, subnet=subnet) for each in inside]


def _address_of(host: Host) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(
            socket.getaddrinfo(host.address, None, socket.AF_INET)[0][4][0]
        )
    except OSError:
        raise UsageError(
            f"host {host.name}: no address is known for {host.address!r}; type address=A.B.C.D "
            "behind its name, or --interface NAME for the head machine's interface to the hosts"
        ) from None
