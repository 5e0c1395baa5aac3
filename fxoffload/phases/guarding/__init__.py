"""Keeps whoever wants to use what is away from doing so by mistake: it returns first, or an error says what to do."""
