"""The paper: losses of off-policy group-relative REINFORCE. Arrays in, arrays out."""
