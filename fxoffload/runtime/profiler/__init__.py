"""Measures segments and steps: times on the compute stream and bytes of the allocator."""
