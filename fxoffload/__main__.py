"""``python -m fxoffload``: the same as the command ``fxoffload``."""

from fxoffload.cli.app import main

if __name__ == "__main__":
    main()
