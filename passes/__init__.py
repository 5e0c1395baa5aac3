"""The FX passes, one per file. Imported as ``fxoffload.passes``, never as ``passes``."""

if __name__ != "fxoffload.passes":
    # A second copy under another name would register the custom operators twice.
    raise ImportError(
        f"this package was imported as {__name__!r}; import it as 'fxoffload.passes' instead "
        "(for example: from fxoffload.passes import cut_segments)"
    )
