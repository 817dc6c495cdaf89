"""Programs that talk to the policy."""
