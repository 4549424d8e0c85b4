"""The layout "columns": rows of many items in one member."""
