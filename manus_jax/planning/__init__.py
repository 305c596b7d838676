"""What an update will need on hardware that is not there: memory, work, traffic, time."""
