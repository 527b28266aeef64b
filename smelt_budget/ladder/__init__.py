"""What does a whole comparison cost? A grid of pairs and horizons, planned before it is paid for."""
