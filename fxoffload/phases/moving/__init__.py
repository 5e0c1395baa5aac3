"""Moves storages between a device and the host image."""
