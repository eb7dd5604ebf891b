"""The demo: train on real images with one rank and with several, compare, report."""
