"""Make a snapshot beside training: layout -> writer -> parts -> the manifest."""
