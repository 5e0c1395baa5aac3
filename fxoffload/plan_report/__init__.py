"""The report of ``fxoffload.explain()``: plans, measurements, exposed copies, advice."""
