"""Measures what segments and steps really take: times on the compute stream and bytes of the allocator."""
