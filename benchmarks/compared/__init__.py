"""Libraries compared with Dure: groups of ranks that take turns, and what they measured."""
