"""The demo: the main job from end to end, on scenes that the package draws itself.

>>> run_demo(Path("demo-run"), keep=True)
"""

from rwkvclip_cli.demo.run import run_demo

__all__ = ["run_demo"]
