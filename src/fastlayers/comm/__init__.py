"""Parallel topology, tensor layouts and the communicator between layers."""
