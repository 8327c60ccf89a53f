"""Settings of the whole suite: one thread a process, since tests run beside each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
