"""What a peer needs and this machine may lack. Nothing here imports torch."""


class NotAvailable(Exception):
    """A variant that cannot run here through no fault of its own. The text says what to give; the row is skipped."""
