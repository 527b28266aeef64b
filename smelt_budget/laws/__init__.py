"""What do losses say? Fit, frontier, savings, allocation."""
