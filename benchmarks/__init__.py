"""Measures fxoffload against its peers, one process per variant. See README.md."""
