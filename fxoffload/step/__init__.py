"""The calls of a step as plain data: what moves, what is measured, what passes between them."""
