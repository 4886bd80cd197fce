"""`report`: results from JSON files as one Markdown document with pictures."""
