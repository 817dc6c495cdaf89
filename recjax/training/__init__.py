"""The pieces of the train loop that touch devices or disks."""
