"""Adapters for training frameworks. Each module needs its framework installed."""
