"""The scenario ``collectives``: all-gathers and reduce-scatters during copies, without a model."""
