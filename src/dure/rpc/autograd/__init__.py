"""Distributed autograd: gradients of graphs that go through several processes."""
