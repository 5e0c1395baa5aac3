"""The scenario ``collectives``: all-gathers and reduce-scatters beside copies, without a model."""
