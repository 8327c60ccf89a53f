"""How many processor cores there are to work with.

>>> usable_cores() >= 1
True
"""

import os


def usable_cores() -> int:
    """The cores that this process may use, where the system tells it; else all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
