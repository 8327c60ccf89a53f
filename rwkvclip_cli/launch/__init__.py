"""Start torchrun on one node or many, watch over it, and end with an honest exit code. Never imports torch.

>>> plan(LaunchConfig(gpus=8), ("train",), survey(LaunchConfig(gpus=8))).here.line
"""
