"""Steps over several compiled graphs: their calls as they go by, and the memory that passes between them."""
