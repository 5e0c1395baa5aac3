"""Adapters for training frameworks.

``transformers`` and ``trl`` need transformers installed. ``verl`` and ``nemo_rl`` can be imported without theirs.
"""
