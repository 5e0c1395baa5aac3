"""Guards the use of away tensors: either their memory returns first, or an error says what to do."""
