"""``fxoffload bench``: a quick look at what this machine gains, with a decoder sized to its GPU."""
