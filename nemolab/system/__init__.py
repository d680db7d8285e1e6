"""What the operating system grants this process: mounts, cgroups, memory, limits. Needs no library.

Functions that ask take the folder that /proc and /sys lie in, so that a test can give them a machine of its own making.
"""
