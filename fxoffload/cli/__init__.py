"""The command ``fxoffload``: a folder of subcommands, each imported by the command line only."""
