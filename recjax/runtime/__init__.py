"""What the package needs from a machine: processes, files, memory, the console, clocks."""
