"""`python -m rwkvclip_cli` is the `rwkvclip` command, for machines where it is not on PATH.

$ python -m rwkvclip_cli --version
"""

from rwkvclip_cli.cli import main

if __name__ == "__main__":
    main()
