"""Dure's tests, by the package that they test; see CONTRIBUTING.md."""
