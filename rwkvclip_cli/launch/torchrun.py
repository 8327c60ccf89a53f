"""From options to exit code: check, plan, then print, replace this process, or run and supervise torchrun.

>>> start(LaunchConfig(gpus=8), ("train", "--output", "run"), without_gpu="")
"""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping

from rwkvclip_cli import console
from rwkvclip_cli.config import LaunchConfig
from rwkvclip_cli.console import EXIT_DONE
from rwkvclip_cli.launch import network, preflight
from rwkvclip_cli.launch.peers import peers_at
from rwkvclip_cli.launch.plan import LaunchPlan, check_options, hosts_endpoint, plan, ranks_here
from rwkvclip_cli.launch.supervise import supervise


def check_usage(config: LaunchConfig, retyped: Callable[..., str]) -> None:
    """Refuse options that contradict each other, with a UsageError.

    `retyped` gives the command line with some options changed: `retyped(node_rank=0)`.
    """
    check_options(config, retyped, network.main_address())


def check_machine(config: LaunchConfig, *, without_gpu: str) -> None:
    """Refuse what this machine cannot do, as `start` would, and start nothing."""
    machine = preflight.survey(config)
    ranks_here(config, machine.gpus, without_gpu)
    if config.preflight:
        preflight.check(config, machine, without_gpu)


def start(
    config: LaunchConfig,
    command: tuple[str, ...],
    *,
    without_gpu: str,
    rdzv_conf: Mapping[str, str] | None = None,
) -> int:
    """Run `rwkvclip COMMAND` on every rank of this node, and return the exit code to leave with.

    `config` has passed `check_usage`; `without_gpu` is what to type where there is no GPU. Raises UnableError
    where this machine cannot do it, UsageError where the endpoint is on another machine than it should be.
    """
    machine = preflight.survey(config)
    if config.preflight and not config.dry_run:
        preflight.check(config, machine, without_gpu)
    planned = plan(config, command, machine, without_gpu=without_gpu, rdzv_conf=rdzv_conf)
    if config.dry_run:
        _print(planned, config)
        return EXIT_DONE
    if config.exec:
        sys.stdout.flush()
        os.execve(planned.here.argv[0], planned.here.argv, planned.here.environment(os.environ))
    with contextlib.ExitStack() as stack:
        peers, meeting = None, ""
        if config.nodes > 1 and config.rdzv_endpoint is not None:
            endpoint = network.parse_endpoint(config.rdzv_endpoint)
            hosting = hosts_endpoint(config, machine)
            peers = stack.enter_context(peers_at(endpoint, job=config.rdzv_id, hosting=hosting))
            meeting = f"{config.nodes} nodes at {endpoint}"
        return supervise(planned.here, stop_grace_s=config.stop_grace, peers=peers, meeting=meeting)


def _print(planned: LaunchPlan, config: LaunchConfig) -> None:
    for node in planned.nodes:
        console.result(node.line)
    for note in planned.notes:
        console.say(note)
    if config.nodes > len(planned.nodes):
        console.say("this node's line: on each other node the same rwkvclip command prints that node's own")
