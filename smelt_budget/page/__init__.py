"""What is shown to people who did not run it? Results as one self-contained HTML page, and as Markdown."""
