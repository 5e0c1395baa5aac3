"""Plain data of a step: its calls, the choices made for them, and the measurements of its segments."""
