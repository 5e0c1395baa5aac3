"""The copy streams of a device, and measures that keep copies and other work from slowing each other."""
