"""Make a snapshot beside training: layout -> staging -> writer -> part_reports -> the manifest."""
