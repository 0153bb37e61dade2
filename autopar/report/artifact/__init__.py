"""Programs saved as readable text."""
