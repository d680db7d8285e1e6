"""What the operating system grants this process: mounts, cgroups, memory, limits. Needs no library.

Every function takes the folder that /proc and /sys lie in, so that a test can give it a machine of its own.
"""
