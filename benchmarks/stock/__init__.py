"""Stock Hugging Face models as a user trains them: the scenarios ``stock`` and ``stock-fsdp``."""
