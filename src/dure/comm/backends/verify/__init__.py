"""Comparing calls over engines that do not compare them themselves."""
