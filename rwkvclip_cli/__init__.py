"""Pack image-text data, train RWKV-CLIP on any number of GPUs, and prove that the result is right.

$ python -m rwkvclip_cli --help
"""

__version__ = "0.1.0"
