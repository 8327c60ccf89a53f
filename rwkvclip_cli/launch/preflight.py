"""Look at this machine before torch starts: the facts that a plan needs, and what would make it fail later.

>>> check(config, survey(config), without_gpu="rwkvclip launch --cpus 2")
"""

import os
import socket
import sys

from rwkvclip_cli import console
from rwkvclip_cli.config import LaunchConfig
from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.cores import usable_cores
from rwkvclip_cli.launch import gpus, network
from rwkvclip_cli.launch.network import Endpoint
from rwkvclip_cli.launch.plan import Machine, backend_of, hosts_endpoint


def survey(config: LaunchConfig) -> Machine:
    """Gather the facts about this machine that `plan` and `check` go by; refuses and changes nothing."""
    addresses: list[str] | None = None
    address, here = network.main_address(), True
    if config.rdzv_endpoint is not None:
        addresses = network.resolve(network.parse_endpoint(config.rdzv_endpoint).host)
        address, here = network.towards(addresses, network.own_addresses())
    return Machine(
        python=sys.executable,
        cores=usable_cores(),
        gpus=0 if config.cpus else gpus.count_visible_gpus(),
        address=address,
        endpoint_is_known=addresses != [],
        endpoint_is_here=here,
        free_port=network.free_port(),
        environ=dict(os.environ),
    )


def check(config: LaunchConfig, machine: Machine, without_gpu: str) -> None:
    """Raise what would otherwise surface as a hang or as a torch error; warn of what only might.

    UnableError: fewer GPUs than asked, or a port that is taken. UsageError: an endpoint on the wrong machine.
    """
    if config.gpus is not None and config.gpus > machine.gpus:
        raise UnableError(_too_few(config.gpus, machine), f"--gpus {machine.gpus}" if machine.gpus else without_gpu)
    if machine.environ.get("GLOO_SOCKET_IFNAME", "").startswith("^"):
        console.warn(
            f"GLOO_SOCKET_IFNAME={machine.environ['GLOO_SOCKET_IFNAME']}: gloo takes names of interfaces, "
            "not NCCL's ^ for all others"
        )
    if config.rdzv_endpoint is None:
        return
    endpoint = network.parse_endpoint(config.rdzv_endpoint)
    if not machine.endpoint_is_known:
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: this machine knows no address of {endpoint.host!r}",
            f"--rdzv-endpoint ADDRESS_OF_NODE_0:{endpoint.port}",
        )
    _check_side(config, machine, endpoint)
    _check_port(config, machine, endpoint)


def _check_port(config: LaunchConfig, machine: Machine, endpoint: Endpoint) -> None:
    if not hosts_endpoint(config, machine):
        if network.is_foreign(endpoint):
            raise UnableError(
                f"--rdzv-endpoint {endpoint}: a program listens there that is no rendezvous of torch's",
                "another port in --rdzv-endpoint, the same on every node; `ss -ltnp` on node 0 names the owner",
            )
        return
    owner = network.port_owner(endpoint.port) if endpoint.port else None
    if owner is not None:
        free = Endpoint(endpoint.host, network.free_port())
        raise UnableError(
            f"port {endpoint.port} of --rdzv-endpoint {endpoint} is taken by {owner}", f"--rdzv-endpoint {free}"
        )


def _check_side(config: LaunchConfig, machine: Machine, endpoint: Endpoint) -> None:
    first = config.nodes == 1 or config.node_rank == 0
    if first and not machine.endpoint_is_here:
        what = "the only node" if config.nodes == 1 else "node 0"
        example = Endpoint(machine.address or "ADDRESS_OF_NODE_0", endpoint.port)
        raise UsageError(
            f"--rdzv-endpoint {endpoint} is not an address of this machine, which is {what}",
            f"--rdzv-endpoint {example}",
        )
    if config.node_rank is not None and backend_of(config) == "c10d" and config.nodes > 1:
        console.warn(
            f"the c10d rendezvous numbers the nodes itself: --node-rank {config.node_rank} has no effect on the ranks"
        )


def _too_few(asked: int, machine: Machine) -> str:
    if machine.gpus == 0 and "CUDA_VISIBLE_DEVICES" not in machine.environ:
        return f"{asked} GPUs asked, none on this machine ({socket.gethostname()})"
    because = ""
    if "CUDA_VISIBLE_DEVICES" in machine.environ:
        because = f" with CUDA_VISIBLE_DEVICES={machine.environ['CUDA_VISIBLE_DEVICES']!r}"
    return f"{asked} GPUs asked, {machine.gpus} visible on {socket.gethostname()}{because}"
