"""One of two ranks for the tests of the sweep: runs every scenario in turn, prints rank 0's report of each as JSON.

    $ RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 python stub_rank.py PORT PORT ...

The last scenario stops rank 1, which has to be noticed.
"""

import dataclasses
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from rwkvclip_cli.config import NcclCheckConfig
from rwkvclip_cli.nccl import watch
from rwkvclip_cli.nccl.collectives import COLLECTIVES, Collective
from rwkvclip_cli.nccl.sweep import run

RANK = int(os.environ["RANK"])
PLAIN = NcclCheckConfig(backend="gloo", iterations=2)


def damaged(source: torch.Tensor, output: torch.Tensor) -> None:
    """An all_reduce that gets one element wrong, on rank 1, in long messages alone."""
    dist.all_reduce(output)
    if RANK == 1 and output.numel() > 64:
        output[65] += 1


def through_mud(source: torch.Tensor, output: torch.Tensor) -> None:
    """An all_reduce over a network that is slow and works: a size outlasts --timeout, an operation does not."""
    time.sleep(0.3)
    dist.all_reduce(output)


def stopped(source: torch.Tensor, output: torch.Tensor) -> None:
    """An all_reduce in which rank 1 stops for good, as on a machine that hangs."""
    if RANK == 1:
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(output)


def with_run(function: object) -> dict[str, Collective]:
    return {"all_reduce": dataclasses.replace(COLLECTIVES["all_reduce"], run=function)}  # type: ignore[arg-type]


def report(name: str, config: NcclCheckConfig, sizes: list[int], collectives: dict[str, Collective]) -> None:
    made = run(config, sizes, collectives)
    print(json.dumps([name, made.document()]), flush=True)


def main(ports: list[str]) -> None:
    everything = dict(COLLECTIVES)
    true_version = torch.__version__
    remaining = iter(ports)

    def on_a_fresh_port() -> None:
        os.environ["MASTER_PORT"] = next(remaining)

    for op in COLLECTIVES:
        on_a_fresh_port()
        report(op, dataclasses.replace(PLAIN, op=op), [4, 8, 12, 1000], everything)
    on_a_fresh_port()
    report("damaged", PLAIN, [8, 256, 512, 1024], with_run(damaged))
    on_a_fresh_port()
    report("slow", dataclasses.replace(PLAIN, min_busbw=1e6), [8, 256], everything)
    on_a_fresh_port()
    report("task", dataclasses.replace(PLAIN, iterations=2 + RANK), [8], everything)
    on_a_fresh_port()
    silence_s, watch.SILENCE_S = watch.SILENCE_S, 1.0
    report("mud", dataclasses.replace(PLAIN, timeout=1.0, iterations=6), [8], with_run(through_mud))
    watch.SILENCE_S = silence_s
    on_a_fresh_port()
    torch.__version__ = "2.9.0" if RANK else true_version
    report("versions", PLAIN, [8], everything)
    on_a_fresh_port()
    torch.__version__ = true_version
    report("stopped", dataclasses.replace(PLAIN, timeout=1.0), [8], with_run(stopped))


if __name__ == "__main__":
    main(sys.argv[1:])
