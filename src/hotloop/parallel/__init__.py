"""Processes: launching them, and data parallelism over them."""

from hotloop.parallel.launch import Launch, launch_processes

__all__ = ["Launch", "launch_processes"]
