"""The host memory that values move to: one pinned range per device, its growth, limits and bookkeeping."""
