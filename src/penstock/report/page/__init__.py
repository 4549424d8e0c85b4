"""The page: HTML, SVG charts, layout."""
