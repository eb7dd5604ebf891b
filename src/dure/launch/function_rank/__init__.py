"""The program of a spawned rank."""
