"""The machine under the package: processes, files, memory, the console, clocks."""
