"""Bounds that the options of commands and the parts that keep them share. Here, because loading `config` takes longer.

>>> MAX_PIXELS
178956970
"""

MAX_PIXELS = 178_956_970  # Pillow's own bound against decompression bombs
