"""The copy streams of a device, and what keeps copies and other work from slowing each other."""
