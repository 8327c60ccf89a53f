"""This machine's speed: loader, WKV6, loss and whole training step, and which of them holds a run up.

>>> bench(BenchConfig(model="tiny", batch_size=8, steps=2)).slowest
'step'
"""

from rwkvclip_cli.bench.run import bench

__all__ = ["bench"]
