"""What gives groups to the queue: the policy, or a store."""
