"""Discrete-event simulation of a job graph on a cluster; imports neither torch nor protobuf."""
