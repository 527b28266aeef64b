"""What a person sees: tables of results, nothing computed."""
