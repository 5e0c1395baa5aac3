"""Ways to train with fewer saved activations that are not fxoffload's: variants of scenario ``activations``."""
