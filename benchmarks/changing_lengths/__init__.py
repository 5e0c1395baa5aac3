"""The scenario ``fsdp-lengths``: sharded ranks train on batches whose length changes from step to step."""
