"""Publishing weights from the learner to the servers: versions, snapshots and deltas."""
