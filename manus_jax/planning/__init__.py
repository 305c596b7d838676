"""Memory, FLOPs, communication and time of an update on hardware that is not present."""
