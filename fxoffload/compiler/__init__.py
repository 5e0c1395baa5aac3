"""From a partitioned graph to callables: segment compilation and the session that runs the passes."""
