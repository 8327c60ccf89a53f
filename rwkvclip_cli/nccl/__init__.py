"""The ranks' side of `rwkvclip nccl-check`: collectives whose results can be told right from wrong, timed.

>>> from rwkvclip_cli.nccl.sweep import run
"""
