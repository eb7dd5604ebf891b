"""Programs and functions for the tests of remote calls."""
