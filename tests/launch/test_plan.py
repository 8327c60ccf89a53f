"""Options and facts give exactly these commands."""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from rwkvclip_cli.config import LaunchConfig, retype
from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.launch.plan import LaunchPlan, Machine, NodeCommand, check_options, hosts_endpoint, plan

TRAIN = ("train", "--output", "my run", "--train-data", "pairs.rec")
WORKER = "-m rwkvclip_cli train --output 'my run' --train-data pairs.rec"
MACHINE = Machine(python="/opt/py/bin/python", cores=16, gpus=8, address="10.0.0.1")
ELSEWHERE = dataclasses.replace(MACHINE, address="10.0.0.7", endpoint_is_here=False)


def plan_of(machine: Machine = MACHINE, **options: object) -> LaunchPlan:
    return plan(LaunchConfig(**options), TRAIN, machine)  # type: ignore[arg-type]


def lines(machine: Machine = MACHINE, **options: object) -> list[str]:
    return [node.line for node in plan_of(machine, **options).nodes]


def test_one_node_takes_all_its_gpus_and_a_free_port() -> None:
    assert lines() == [
        "env OMP_NUM_THREADS=1 RWKVCLIP_DEVICE=cuda /opt/py/bin/python -m torch.distributed.run --nproc-per-node 8 "
        "--nnodes 1 --max-restarts 0 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --rdzv-id rwkvclip "
        "--local-addr 127.0.0.1 " + WORKER
    ]


def test_cpu_ranks_share_the_cores() -> None:
    assert lines(cpus=3) == [
        "env OMP_NUM_THREADS=5 RWKVCLIP_DEVICE=cpu /opt/py/bin/python -m torch.distributed.run --nproc-per-node 3 "
        "--nnodes 1 --max-restarts 0 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --rdzv-id rwkvclip "
        "--local-addr 127.0.0.1 " + WORKER
    ]
    assert "OMP_NUM_THREADS=1 " in lines(cpus=64)[0]


def test_numbered_nodes_are_static_and_every_node_has_its_line() -> None:
    options = {"gpus": 4, "nodes": 3, "node_rank": 1, "rdzv_endpoint": "10.0.0.1:29500", "nccl_debug": "INFO"}
    expected = [
        "env OMP_NUM_THREADS=1 RWKVCLIP_DEVICE=cuda NCCL_DEBUG=INFO /opt/py/bin/python -m torch.distributed.run "
        f"--nproc-per-node 4 --nnodes 3 --max-restarts 0 --node-rank {rank} --rdzv-backend static "
        "--rdzv-endpoint 10.0.0.1:29500 --rdzv-id rwkvclip " + WORKER
        for rank in range(3)
    ]
    planned = plan_of(ELSEWHERE, **options)
    assert [node.line for node in planned.nodes] == expected
    assert planned.here is planned.nodes[1]


@pytest.mark.parametrize(("machine", "is_host"), [(MACHINE, 1), (ELSEWHERE, 0)])
def test_c10d_tells_torchrun_who_hosts_and_what_address_to_publish(machine: Machine, is_host: int) -> None:
    assert lines(machine, gpus=8, nodes=2, rdzv_endpoint="10.0.0.1:29500", rdzv_id="run7") == [
        "env OMP_NUM_THREADS=1 RWKVCLIP_DEVICE=cuda /opt/py/bin/python -m torch.distributed.run --nproc-per-node 8 "
        "--nnodes 2 --max-restarts 0 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 --rdzv-id run7 "
        f"--rdzv-conf is_host={is_host} --local-addr {machine.address} " + WORKER
    ]


def test_restarts_want_c10d_even_for_numbered_nodes() -> None:
    (line,) = lines(nodes=2, node_rank=0, rdzv_endpoint="10.0.0.1:29500", max_restarts=3)
    assert "--max-restarts 3 --rdzv-backend c10d" in line
    assert "--node-rank" not in line


def test_static_on_one_node_gets_a_real_port() -> None:
    machine = dataclasses.replace(MACHINE, free_port=43210)
    assert (
        "--node-rank 0 --rdzv-backend static --rdzv-endpoint 127.0.0.1:43210"
        in lines(machine, rdzv_backend="static")[0]
    )


def test_one_node_keeps_a_named_endpoint() -> None:
    (line,) = lines(rdzv_endpoint="[fd00::2]:29500")
    assert "--rdzv-backend c10d --rdzv-endpoint '[fd00::2]:29500' --rdzv-id rwkvclip --rdzv-conf is_host=1" in line


def test_thread_count_of_the_user_stays() -> None:
    machine = dataclasses.replace(MACHINE, environ={"OMP_NUM_THREADS": "6"})
    assert lines(machine)[0].startswith("env RWKVCLIP_DEVICE=cuda /opt/py/bin/python -m torch.distributed.run ")


def test_thread_count_of_the_user_holds_on_every_node() -> None:
    machine = dataclasses.replace(MACHINE, environ={"OMP_NUM_THREADS": "6", "PET_STANDALONE": "1"})
    here, other = lines(machine, cpus=2, nodes=2, node_rank=0, rdzv_endpoint="10.0.0.1:29500")
    assert here.startswith("env -u PET_STANDALONE RWKVCLIP_DEVICE=cpu /opt/py/bin/python ")
    assert other.startswith("env OMP_NUM_THREADS=6 RWKVCLIP_DEVICE=cpu /opt/py/bin/python ")


def test_pet_variables_cannot_change_what_runs() -> None:
    environ = {
        "PET_NNODES": "4",
        "PET_STANDALONE": "1",
        "PET_LOG_DIR": "/logs",
        "PET_RDZV_CONF": "join_timeout=30,is_host=0",
        "PET_LOCAL_ADDR": "10.9.9.9",
        "NCCL_IB_HCA": "mlx5",
        "HOME": "/root",
    }
    machine = dataclasses.replace(MACHINE, environ=environ)
    planned = plan_of(machine, nodes=2, rdzv_endpoint="10.0.0.1:29500", nccl_debug="WARN")
    assert planned.here.line.startswith(
        "env -u PET_STANDALONE OMP_NUM_THREADS=1 RWKVCLIP_DEVICE=cuda NCCL_DEBUG=WARN /opt/py/bin/python "
    )
    assert "--nnodes 2 " in planned.here.line
    assert "--rdzv-conf join_timeout=30,is_host=0 " in planned.here.line
    assert "--local-addr" not in planned.here.line
    assert planned.notes == (
        "NCCL_DEBUG=WARN is set by launch",
        "NCCL_IB_HCA=mlx5 is in force",
        "PET_LOCAL_ADDR=10.9.9.9 is in force",
        "PET_LOG_DIR=/logs is in force",
        "PET_NNODES=4 has no effect: the command line says otherwise",
        "PET_RDZV_CONF=join_timeout=30,is_host=0 is in force",
        "PET_STANDALONE=1 is removed: it would change how torchrun runs the command",
    )
    assert "PET_STANDALONE" not in planned.here.environment(environ)


def test_rendezvous_settings_join_the_plan() -> None:
    planned = plan(LaunchConfig(nodes=2, rdzv_endpoint="a:1"), TRAIN, MACHINE, rdzv_conf={"join_timeout": "60"})
    assert "--rdzv-conf join_timeout=60,is_host=1" in planned.here.line


@pytest.mark.parametrize(
    ("options", "machine", "hosting"),
    [
        ({"node_rank": 0}, MACHINE, True),
        ({"node_rank": 1}, MACHINE, False),  # on one machine with node 0
        ({}, MACHINE, True),
        ({}, ELSEWHERE, False),
        ({"node_rank": 1, "rdzv_backend": "c10d"}, MACHINE, True),  # which ignores the number
    ],
)
def test_who_listens_at_the_endpoint(options: dict[str, object], machine: Machine, hosting: bool) -> None:
    config = LaunchConfig(nodes=2, rdzv_endpoint="10.0.0.1:29500", **options)  # type: ignore[arg-type]
    assert hosts_endpoint(config, machine) is hosting


def test_no_gpu_and_no_number_cannot_run() -> None:
    machine = dataclasses.replace(MACHINE, gpus=0)
    with pytest.raises(UnableError, match="no GPU is visible") as caught:
        plan(LaunchConfig(), TRAIN, machine, without_gpu="rwkvclip launch --cpus 2")
    assert caught.value.exit_code == 3
    assert caught.value.hint == "rwkvclip launch --cpus 2"


def test_the_line_runs_what_the_plan_runs() -> None:
    report = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('A'), os.environ.get('B')]))"
    node = NodeCommand((sys.executable, "-c", report, "two words", "$HOME"), {"A": "x y", "B": None})
    base = {"B": "gone", "PATH": "/usr/bin:/bin"}
    by_line = subprocess.run(node.line, shell=True, env=base, capture_output=True, text=True, check=True)
    by_plan = subprocess.run(node.argv, env=node.environment(base), capture_output=True, text=True, check=True)
    assert json.loads(by_line.stdout) == json.loads(by_plan.stdout) == [["two words", "$HOME"], "x y", None]


def retyped(config: LaunchConfig) -> Callable[..., str]:
    return functools.partial(retype, "launch", config, ["--lr", "1e-3"])


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (
            {"gpus": 8, "nodes": 2},
            "2 nodes need a place to meet: --rdzv-endpoint HOST:PORT, an address of node 0",
            "rwkvclip launch --gpus 8 --nodes 2 --rdzv-endpoint 10.0.0.1:29500 -- --lr 1e-3   (the same on every node)",
        ),
        (
            {"nodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"},
            "--node-rank counts from 0, so 2 nodes end at 1; got 2",
            "",
        ),
        (
            {"nodes": 2, "rdzv_endpoint": "localhost:29400"},
            "--rdzv-endpoint localhost:29400: every machine calls itself localhost, so each node would wait for itself",
            "rwkvclip launch --nodes 2 --rdzv-endpoint 10.0.0.1:29500 -- --lr 1e-3   (the same on every node)",
        ),
        (
            {"nodes": 2, "rdzv_endpoint": "[::1]:29400"},
            "--rdzv-endpoint [::1]:29400: every machine calls itself ::1, so each node would wait for itself",
            "rwkvclip launch --nodes 2 --rdzv-endpoint 10.0.0.1:29500 -- --lr 1e-3   (the same on every node)",
        ),
        (
            {"nodes": 2, "rdzv_endpoint": "node0:0"},
            "--rdzv-endpoint node0:0: the other nodes cannot know which port 0 becomes",
            "rwkvclip launch --nodes 2 --rdzv-endpoint node0:29500 -- --lr 1e-3   (the same on every node)",
        ),
        (
            {"nodes": 2, "rdzv_endpoint": "node0:1", "rdzv_backend": "static", "preflight": False},
            "--rdzv-backend static needs --node-rank, another one on each node",
            "rwkvclip launch --nodes 2 --node-rank 0 --rdzv-endpoint node0:1 --rdzv-backend static --no-preflight "
            "-- --lr 1e-3",
        ),
    ],
)
def test_contradictions_are_wrong_usage(options: dict[str, object], message: str, hint: str) -> None:
    config = LaunchConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        check_options(config, retyped(config), "10.0.0.1")
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpus": 8, "nodes": 2, "rdzv_endpoint": "node0:29500"},
        {"gpus": 8, "nodes": 2, "rdzv_endpoint": "10.0.0.1:29500", "node_rank": 1},
        {"cpus": 2, "rdzv_endpoint": "localhost:0"},
        {"rdzv_backend": "static"},
    ],
)
def test_sound_options_pass(options: dict[str, object]) -> None:
    config = LaunchConfig(**options)  # type: ignore[arg-type]
    check_options(config, retyped(config), None)
