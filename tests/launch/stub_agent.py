"""A torchrun for the launcher's tests, without torch: two ranks, its report of failures, its way of ending them.

`python stub_agent.py MODE` runs stub_worker; with MODE "waiting" it starts no rank, as if other nodes were missing.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("stub_worker.py")
REPORT = """Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
stub_worker FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node0
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


def main(mode: str) -> int:
    print("agent", os.getpid(), flush=True)
    if mode == "waiting":
        time.sleep(120)
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), mode],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            start_new_session=True,
        )
        for rank in range(2)
    ]
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed and None not in codes:
            return 0
        if failed:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGTERM)
                worker.wait()
            worker = workers[failed[0]]
            print(REPORT.format(rank=failed[0], code=worker.returncode, pid=worker.pid), file=sys.stderr)
            return 1
        time.sleep(0.02)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
