"""What turns image-text sources into a packed data set: read, prove, tokenize, write.

>>> from rwkvclip_cli.data.packing.pack import pack
"""
